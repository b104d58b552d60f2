#include "verdict.h"

#include "sight.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define PATIENCE 20 /* s that a repair may take before it counts as hanging */

static bool is_full(const scene *s, uint32_t q)
{
	const shmq_slot_desc *slots = (const void *)((const uint8_t *)queue_of(s, q) +
	                                             queue_of(s, q)->slots_at);
	uint32_t ready = 0;

	for (uint32_t i = 0; i < queue_of(s, q)->slots_committed; i++)
		ready += (slots[i].word & 0xff) == SHMQ_READY;
	return ready == s->limits.mem_queue_size;
}

static bool is_limited(const scene *s)
{
	for (uint32_t q = 0; q < s->ledger->queues; q++)
		if (queue_of(s, q)->policy & SHMQ_POLICY_LIMITS)
			return true;
	return false;
}

/* A client publishes, before anybody has looked after the dead. */
static void publisher_comes(scene *s)
{
	int r;

	come(s);
	if (queue_of(s, 0)->settings[queue_of(s, 0)->policy & 1].overflow >= SHMQ_OVERFLOW_DROP_OLDEST)
		return; /* it would drop what the ledger still counts on */
	r = try_publish(s, s->mine, s->my_producer, 1, SMALL, 0);
	if ((r == SHMQ_FULL && is_full(s, 0)) ||
	    ((r == SHMQ_FULL || r == SHMQ_REJECTED) && is_limited(s)))
		return;
	if (r != SHMQ_NEED_BACKLOG && r != SHMQ_GONE)
		EQUAL(r, 0);
}

/* A client takes and finishes one, likewise. */
static void consumer_comes(scene *s)
{
	shmq_message m;
	uint32_t got;
	int r;

	s->mine = attach(s, SHMQ_AS_CLIENT);
	if (!s->ledger->queues || !queue_lives(s, 0))
		return;
	s->ledger->takers++;
	s->my_consumer = consume(s, s->mine, 0);
	r = WATCHED(shmq_take(s->my_consumer, &m, 1, soon(), &got));
	if (r != SHMQ_EMPTY && r != SHMQ_GONE) {
		EQUAL(r, 0);
		finish(s, 0, s->my_consumer, &m, 1);
	}
	EQUAL(WATCHED(shmq_consumer_close(s->my_consumer, soon())), 0);
}

/* As the supervisor's main loop, or a new one's start. */
static void reaper_comes(scene *s)
{
	s->home = attach(s, SHMQ_AS_SUPERVISOR);
	if (s->operation->supervisor) {
		supervise(s, s->home);
		adopt_all(s, s->home);
	}
	reap_all(s, s->home);
}

/* A process that made a queue and died may have entered it. */
static void look_for_the_new_queue(scene *s)
{
	const shmq_entry_desc *e = &entries_of(s)[s->ledger->new_index];

	if (s->ledger->new_serial && e->state == SHMQ_ENTRY_LIVE && e->serial == s->ledger->new_serial)
		add_queue(s, s->ledger->new_index, s->ledger->new_serial, true);
}

void repair(scene *s, enum comer first)
{
	look_for_the_new_queue(s);
	if (first == A_PUBLISHER)
		publisher_comes(s);
	if (first == A_CONSUMER)
		consumer_comes(s);
	reaper_comes(s);
}

/* The next process that uses a topic or a queue repairs it. */
static void knock(scene *s)
{
	uint32_t moved;
	int r;

	for (uint32_t i = 0; i < directory_of(s)->topics_committed; i++) {
		if (topics_of(s)[i].state != SHMQ_ENTRY_LIVE)
			continue;
		r = CALL(s, s->home, shmq_pump(s->home, i, topics_of(s)[i].generation, 0, soon(), &moved));
		if (r && r != SHMQ_EMPTY)
			wrong("nobody can publish to topic %u: %s", i, shmq_status_name(r));
	}
	for (uint32_t q = 0; q < s->ledger->queues; q++)
		if (queue_lives(s, q))
			EQUAL(shmq_consumer_close(consume(s, s->alive, q), soon()), 0);
}

/* Everything out of a queue, through the library. */
static void drain(scene *s, uint32_t q)
{
	shmq_consumer *c = consume(s, s->alive, q);
	uint32_t got, expired, due;
	shmq_message m[8];

	for (;;) {
		int r = shmq_take(c, m, 8, soon(), &got);

		if (r == 0) {
			finish(s, q, c, m, got);
			continue;
		}
		EQUAL(r, SHMQ_EMPTY);
		if (queue_of(s, q)->disk_read != queue_of(s, q)->disk_write && !queue_of(s, q)->run.lease) {
			restore(s, s->home, q);
			continue;
		}
		/* Deferred and leased messages come too; nothing is in flight any more. */
		EQUAL(shmq_expire(s->home, s->ledger->queue[q].index,
		                  &(shmq_expiry){.now = INT64_MAX - 1, .realtime = INT64_MAX, .limit = 100},
		                  soon(), &expired, &due),
		      0);
		EQUAL(expired, 0);
		if (shmq_dead_waiting(s->home, s->ledger->queue[q].index)) {
			uint32_t moved;

			CHECK(s->ledger->carries && q == 0);
			EQUAL(CALL(s, s->home,
			           shmq_dead_move(s->home, s->ledger->queue[q].index,
			                          s->ledger->queue[q].serial, &s->ledger->dead,
			                          &(shmq_dead_wish){.n = 100}, soon(), &moved)),
			      0);
			continue;
		}
		if (!due && queue_of(s, q)->requeue_head == queue_of(s, q)->requeue_tail &&
		    queue_of(s, q)->disk_read == queue_of(s, q)->disk_write &&
		    !(q == 0 && load_chunk(s, s->home, 8)))
			break;
	}
	EQUAL(shmq_consumer_close(c, soon()), 0);
	shmq_consumer_free(c);
}

static void drain_all(scene *s)
{
	for (uint32_t q = 0; q < s->ledger->queues; q++)
		if (queue_lives(s, q))
			drain(s, q);
	for (uint32_t q = 0; q < s->ledger->queues; q++) {
		if (!queue_lives(s, q))
			continue;
		for (uint32_t i = 0; i < s->ledger->next; i++)
			if (s->ledger->fate[q][i] == DUE)
				wrong("queue %u: message %u is never delivered", q, i);
	}
	for (uint32_t q = 0; q < s->ledger->queues; q++)
		for (uint32_t i = 0; i < s->ledger->next; i++)
			s->ledger->fate[q][i] = DONE;
	see_structure(s, "drained");
	see_messages(s, "drained");
}

static bool has_channel(const scene *s)
{
	for (uint32_t q = 0; q < s->ledger->queues; q++)
		if (queue_lives(s, q))
			return true;
	return false;
}

static void judge(scene *s, enum comer first, const marks *others)
{
	repair(s, first);
	s->alive = attach(s, SHMQ_AS_CLIENT);
	s->producer = produce(s, s->alive);
	knock(s);
	see_structure(s, "repaired");
	see_messages(s, "repaired");
	if (s->operation->after)
		s->operation->after(s);
	/* Now everybody else: what they held comes back. */
	marks_apply(others, s->files);
	supervise(s, s->home);
	adopt_all(s, s->home);
	reap_all(s, s->home);
	knock(s);
	see_locks(s);
	see_structure(s, "alone");
	see_messages(s, "alone");
	drain_all(s);
	if (has_channel(s)) {
		publish(s, s->alive, s->producer, 2, SMALL, 0);
		publish(s, s->alive, s->producer, 1, LARGE, 0);
		see_structure(s, "published again");
		see_messages(s, "published again");
		drain_all(s);
	}
	see_empty(s);
}

bool verdict(const scene *of, enum comer first, const marks *others)
{
	int status;
	pid_t pid;

	wrong_words[0] = 0;
	pid = fork();
	CHECK(pid >= 0);
	if (!pid) {
		ledger *mine = malloc(sizeof(*mine));
		scene s = *of;

		alarm(PATIENCE);
		watched = false;
		*mine = *of->ledger;
		s.ledger = mine;
		if (s.operation->alone)
			s.operation->after(&s);
		else
			judge(&s, first, others);
		_exit(0);
	}
	while (waitpid(pid, &status, 0) < 0)
		if (errno != EINTR)
			return false;
	if (WIFSIGNALED(status))
		snprintf(wrong_words, WRONG, "whoever repairs ends with signal %d (%s)", WTERMSIG(status),
		         WTERMSIG(status) == SIGALRM ? "it hangs" : strsignal(WTERMSIG(status)));
	else if (status && !wrong_words[0])
		snprintf(wrong_words, WRONG, "whoever repairs ends with status %d", WEXITSTATUS(status));
	return status == 0;
}
