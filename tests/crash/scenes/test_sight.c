/* The verdicts can fail: a sound scene is found sound, and each forged fault is seen. */
#include "image.h"
#include "operations.h"
#include "sight.h"
#include "verdict.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static scene s;
static files here;
static ledger book;
static int missed;

/* In the forked child: what says what is wrong. */
static void see(void)
{
	see_structure(&s, "now");
	see_messages(&s, "now");
}

static void see_only_messages(void)
{
	see_messages(&s, "now");
}

static void the_locks(void)
{
	see_locks(&s);
}

static void nothing_left(void)
{
	see_empty(&s);
}

/* Forge in a child of its own (the files are shared: they are put back), look, compare the
 * words. */
static void forged(const char *what, void (*forge)(void), void (*look)(void), const char *words)
{
	static image before;
	bool right;
	int status;
	pid_t pid;

	if (!before.file[0].bytes)
		image_make(&before);
	image_follow(&before, &here);
	wrong_words[0] = 0;
	pid = fork();
	if (!pid) {
		if (forge)
			forge();
		look();
		_exit(0);
	}
	if (waitpid(pid, &status, 0) != pid)
		abort();
	image_put(&before, &here);
	right = words ? strstr(wrong_words, words) != NULL : !status;
	printf("%-52s %s\n", what, right ? words ? "seen" : "sound" : "MISSED");
	if (!right)
		printf("    wanted '%s', got '%s' (status %x)\n", words ? words : "", wrong_words, status);
	missed += !right;
}

/* The n-th slot of that state, of queue q. */
static shmq_slot_desc *slot_in(uint32_t q, unsigned state, uint32_t n)
{
	shmq_queue_desc *desc = queue_of(&s, q);
	shmq_slot_desc *slots = (shmq_slot_desc *)(void *)((uint8_t *)desc + desc->slots_at);

	for (uint32_t i = 0; i < desc->slots_committed; i++)
		if ((slots[i].word & 0xff) == state && !n--)
			return &slots[i];
	abort();
}

static uint8_t *body_in(uint32_t q, const shmq_slot_desc *slot)
{
	return (uint8_t *)queue_of(&s, q) + queue_of(&s, q)->arena_at + slot->body;
}

static uint32_t number_in(uint32_t q, const shmq_slot_desc *slot)
{
	return body_in(q, slot)[0];
}

/* ---- messages ---- */

static void tear_a_body(void)
{
	body_in(0, slot_in(0, SHMQ_READY, 0))[7]++;
}

static void double_a_body(void)
{
	memcpy(body_in(0, slot_in(0, SHMQ_READY, 0)), body_in(0, slot_in(0, SHMQ_READY, 1)), SMALL);
}

static void publish_less(void)
{
	s.ledger->next = number_in(0, slot_in(0, SHMQ_READY, 0));
}

static void lose_one(void)
{
	slot_in(0, SHMQ_REQUEUED, 0)->word = SHMQ_FREE;
}

static void lose_a_record(void)
{
	queue_of(&s, 0)->disk_read = 30 + SMALL;
}

static void spoil_a_record(void)
{
	book.disk[3]--;
	book.disk[2] = 1;
}

static void read_beyond(void)
{
	queue_of(&s, 0)->disk_read = queue_of(&s, 0)->disk_write + 1;
}

static void swap_orders(void)
{
	shmq_slot_desc *x = slot_in(0, SHMQ_READY, 0), *y = slot_in(0, SHMQ_READY, 1);
	uint64_t order = x->order;

	x->order = y->order;
	y->order = order;
}

static void swap_ids(void)
{
	shmq_slot_desc *x = slot_in(0, SHMQ_READY, 0), *y = slot_in(0, SHMQ_READY, 1);
	uint64_t id = x->id;

	x->id = y->id;
	y->id = id;
}

static void seal_one(void)
{
	shmq_slot_desc *slot = slot_in(0, SHMQ_READY, 0);

	slot->flags |= SHMQ_SLOT_PROPERTIES;
	slot->properties = SHMQ_SLOT_SEALED;
}

static void expect_a_seal(void)
{
	s.ledger->sealed[number_in(0, slot_in(0, SHMQ_READY, 0))] = SEALED;
}

static void change_an_id(void)
{
	slot_in(1, SHMQ_READY, 0)->id++;
}

static void deliver_early(void)
{
	s.ledger->due[number_in(0, slot_in(0, SHMQ_READY, 0))] = 1;
}

static void change_a_due_time(void)
{
	for (uint32_t n = 0;; n++) {
		shmq_slot_desc *slot = slot_in(0, SHMQ_DEFERRED, n);

		if (s.ledger->due[number_in(0, slot)]) {
			slot->deadline++;
			return;
		}
	}
}

static void finish_what_is_there(void)
{
	s.ledger->fate[0][number_in(0, slot_in(0, SHMQ_READY, 0))] = DONE;
}

static void expect_less(void)
{
	s.ledger->fate[0][number_in(0, slot_in(0, SHMQ_IN_FLIGHT, 0))] = NEVER;
}

static void publish_half(void)
{
	uint32_t number = number_in(0, slot_in(0, SHMQ_READY, 0));

	s.ledger->fate[0][number] = s.ledger->fate[1][number] = GROUP;
	slot_in(1, SHMQ_READY, 0)->word = SHMQ_FREE;
}

static void move_half(void)
{
	shmq_queue_desc *from = queue_of(&s, 0), *to = queue_of(&s, 1);
	shmq_slot_desc *slot = (shmq_slot_desc *)(void *)((uint8_t *)to + to->slots_at);

	*slot = *slot_in(0, SHMQ_READY, 0);
	memcpy((uint8_t *)to + to->arena_at + slot->body, (uint8_t *)from + from->arena_at + slot->body,
	       SMALL);
}

/* ---- structure and locks ---- */

static void number_wrongly(void)
{
	entries_of(&s)[0].serial = 77;
}

static void be_unready(void)
{
	queue_of(&s, 0)->segment.ready = SHMQ_RAW_STATE;
}

static void count_wrongly(void)
{
	queue_of(&s, 0)->in_use++;
}

/* Somebody takes them, and is stopped, or dies. */
static pid_t holder(bool dies)
{
	pid_t pid = fork();
	int status;

	if (!pid) {
		pthread_mutex_lock(&topics_of(&s)[s.topic].publish.mutex);
		pthread_mutex_lock(&queue_of(&s, 0)->deliver.mutex);
		raise(dies ? SIGKILL : SIGSTOP);
	}
	if (waitpid(pid, &status, WUNTRACED) != pid)
		abort();
	return pid;
}

static void let_go(pid_t pid)
{
	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
}

static void die_holding(void)
{
	(void)holder(true);
}

static void spoil_for_ever(void)
{
	(void)holder(true);
	if (pthread_mutex_lock(&queue_of(&s, 0)->deliver.mutex) == EOWNERDEAD)
		pthread_mutex_unlock(&queue_of(&s, 0)->deliver.mutex);
	pthread_mutex_lock(&topics_of(&s)[s.topic].publish.mutex);
	pthread_mutex_consistent(&topics_of(&s)[s.topic].publish.mutex);
	pthread_mutex_unlock(&topics_of(&s)[s.topic].publish.mutex);
}

static pid_t stopped;

static void hold(void)
{
	stopped = holder(false);
}

static void the_locks_while_held(void)
{
	pid_t pid = fork();
	int status;

	if (!pid)
		see_locks(&s);
	waitpid(pid, &status, 0);
	let_go(stopped);
	_exit(WEXITSTATUS(status));
}

/* ---- a death, forged and real ---- */

static void the_marks_are_the_kernels(void)
{
	image before;
	marks m;
	files copy;
	uint32_t file;
	uint64_t at;
	pid_t pid = holder(false);

	image_make(&before);
	files_make(&copy);
	marks_read(&m, pid, &here, true);
	EQUAL(m.count, 2);
	image_follow(&before, &here);
	image_put(&before, &copy);
	CHECK(!files_differ(&here, &copy, &file, &at));
	marks_apply(&m, &copy);
	CHECK(files_differ(&here, &copy, &file, &at));
	let_go(pid);
	CHECK(!files_differ(&here, &copy, &file, &at));
	copy.map[0][0]++;
	CHECK(files_differ(&here, &copy, &file, &at) && file == 0 && at == 0);
}

static void crash(scene *unused)
{
	(void)unused;
	raise(SIGSEGV);
}

static void a_crash_is_a_verdict(void)
{
	static const operation crashes = {.after = crash, .alone = true};
	marks nobody = {.count = 0};

	s.operation = &crashes;
	CHECK(!verdict(&s, THE_REAPER, &nobody));
	CHECK(strstr(wrong_words, "ends with signal"));
	_exit(0);
}

static void set(const char *name)
{
	files_make(&here);
	scene_make(&s, operation_named(name), &here, &book);
}

int main(void)
{
	wrong_words = mmap(NULL, WRONG, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (wrong_words == MAP_FAILED)
		return 2;

	set("empty with a file");
	forged("nothing, of one channel", NULL, see, NULL);
	forged("a body is torn", tear_a_body, see, "a body is torn");
	forged("a body is there twice", double_a_body, see, "is there twice");
	forged("a message nobody published", publish_less, see, "was never published");
	forged("a message is lost from memory", lose_one, see_only_messages, "is lost");
	forged("a message is lost from disk", lose_a_record, see, "is lost");
	forged("a record is spoilt", spoil_a_record, see, "a record on disk has");
	forged("the positions on disk are swapped", read_beyond, see_only_messages, "on disk from");
	forged("a message gets a seal", seal_one, see_only_messages, "is sealed");
	forged("a message has lost its seal", expect_a_seal, see_only_messages, "is not sealed");
	forged("two ids change places", swap_ids, see, "has no greater id");
	forged("a deferred message is READY", deliver_early, see, "before its time");
	forged("a due time changes", change_a_due_time, see_only_messages, "has lost its due time");
	forged("a finished message is there", finish_what_is_there, see, "back after its finish");
	forged("a message comes from nowhere", expect_less, see, "comes from nowhere");
	forged("a queue has another serial number", number_wrongly, see, "serial number");
	forged("a queue in use is not ready", be_unready, see, "is live and its segment");
	forged("a counter is wrong", count_wrongly, see, "held is");
	forged("something is left", NULL, nothing_left, "is drained");
	forged("nothing, of the locks", NULL, the_locks, NULL);
	forged("a lock's holder died", die_holding, the_locks, "nobody repaired it");
	forged("a lock is not recoverable", spoil_for_ever, the_locks, "not recoverable");
	forged("a lock is held", hold, the_locks_while_held, "held");
	forged("the tracer's marks are the kernel's", NULL, the_marks_are_the_kernels, NULL);
	forged("whoever repairs crashes", NULL, a_crash_is_a_verdict, NULL);

	set("publish to three channels");
	forged("nothing, of three channels", NULL, see, NULL);
	forged("two messages change places", swap_orders, see_only_messages, "comes behind");
	forged("an id differs between channels", change_an_id, see_only_messages, "another id");
	forged("a publish is there in part", publish_half, see_only_messages, "is there 1 times of 2");

	set("pump");
	forged("nothing, of a backlog on its way", NULL, see, NULL);
	forged("a message is half-way to the channels", move_half, see_only_messages, "half-way");
	return missed != 0;
}
