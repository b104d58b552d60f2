/*
 * Every operation, killed at every point its code passes, at every passing; then repaired, with the
 * repairers killed as well; then recounted (checker.h) and held to the promises:
 *
 *   - what was published (the call had returned) is delivered once on every channel, unless it was
 *     finished; what a finish that returned true took never comes back;
 *   - the interrupted publish is in all channels or in none, the whole batch of it;
 *   - nobody is blocked: every lock can be taken, a new publish, take and finish work everywhere;
 *   - no slot and no byte is lost.
 *
 * The points are read from the sources (native/core), so a new one is tested the day it is written;
 * one that no operation passes fails the test. Usage: test_kill [source directory [operation]].
 */
#include "harness.h"

#ifndef SHMQ_KILLPOINTS
int main(void)
{
	return 77;
}
#else
#include <dirent.h>
#include <signal.h>

#define MESSAGES 400u
#define QUEUES 4u
#define LARGE 70000u
#define SMALL 25u
#define REPAIRERS 3u /* killed, one after the other, before one is let live */

/* What is to become of a message on a queue, as the one who acts on it writes down: before a call
 * the uncertain word, after it the certain one. */
enum fate {
	NEVER,  /* not here */
	DUE,    /* exactly once */
	EITHER, /* being finished or dropped: once or not at all */
	DONE,   /* finished, dropped: never again */
	GROUP   /* being published: all of these or none */
};

typedef struct page {
	uint8_t fate[QUEUES][MESSAGES];
	uint32_t next;      /* number of the next message */
	uint32_t new_queue; /* made by a child */
	uint64_t new_serial;
	uint32_t marked;    /* number of the first message that is published with a mark */
	uint64_t written; /* bytes of the disk file */
	uint32_t chunk_count, chunk_lengths[8]; /* chunk 1 of queue 0 */
	int64_t chunk_dues[8];
	uint8_t chunk[1024];
	uint8_t disk[1 << 17];
} page;

typedef struct killing {
	world *w;
	page *page;
	uint32_t topic, generation;
	uint32_t n, queue[QUEUES], targets; /* targets: bits of the queues a publish reaches */
	uint64_t serial[QUEUES];
	int fd; /* of a queue that a child may make */
	int other;
	uint32_t bell; /* parent's, waiting on queue 0 */
	bool waits;
	shmq_broker *b; /* a client that lives through it all */
	shmq_producer *p;
	shmq_consumer *c; /* of queue 0; what it holds goes back before the end */
	/* the child's */
	shmq_broker *mine;
	shmq_producer *producer;
	shmq_consumer *consumer;
	shmq_message m[64];
	uint32_t got;
	shmq_loan *loan;
	shmq_lessee lessee;
	shmq_lease lease;
	shmq_dead dead;
} killing;

typedef struct operation {
	const char *name;
	uint32_t channels;            /* made before; 0: a backlog */
	void (*prepare)(killing *);   /* in the parent */
	void (*ready)(killing *);     /* in the child, before the point is armed */
	void (*act)(killing *);       /* in the child, armed */
	void (*after)(killing *);     /* in the parent, repaired */
	bool supervisor;              /* the child was the supervisor: its queues are adopted */
	bool out_of_order;
} operation;

static char points[256][64];
static uint32_t point_count, point_hits[256], repair_points[256], repair_count;
static uint32_t deaths, repairer_deaths, runs;
static const char *operating, *dying;
static uint32_t passing;

static void fail(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	fprintf(stderr, "%s, killed at %s (passing %u): ", operating, dying, passing);
	vfprintf(stderr, format, args);
	fprintf(stderr, "\n");
	va_end(args);
	abort();
}

/* ---- messages ---- */

static uint8_t *body_of(uint32_t number, uint32_t length)
{
	uint8_t *body = malloc(length);

	snprintf((char *)body, length, "%05u", number);
	for (uint32_t i = 5; i < length; i++)
		body[i] = (uint8_t)(number * 7 + i);
	return body;
}

static uint32_t number_of(const shmq_message *m)
{
	char digits[6] = {0};
	const uint8_t *body = m->body;
	uint32_t number;

	memcpy(digits, body, 5);
	number = (uint32_t)strtoul(digits, NULL, 10);
	for (uint32_t i = 5; i < m->length; i++)
		if (body[i] != (uint8_t)(number * 7 + i))
			fail("message %u's body is torn at byte %u", number, i);
	return number;
}

static void set_fate(killing *k, uint32_t first, uint32_t n, enum fate fate)
{
	for (uint32_t q = 0; q < k->n; q++)
		for (uint32_t i = first; i < first + n; i++)
			if (k->targets >> q & 1)
				k->page->fate[q][i] = (uint8_t)fate;
}

static void publish(killing *k, shmq_broker *b, shmq_producer *p, uint32_t n, uint32_t length,
                    int64_t due)
{
	shmq_body bodies[64];
	uint32_t first = k->page->next;
	uint64_t id;

	k->page->next += n;
	CHECK(k->page->next <= MESSAGES);
	for (uint32_t i = 0; i < n; i++)
		bodies[i] = (shmq_body){body_of(first + i, length), length};
	set_fate(k, first, n, GROUP);
	EQUAL(MAPPED(k->w, b, shmq_publish(p, bodies, n, due, soon(), &id)), 0);
	set_fate(k, first, n, DUE);
	for (uint32_t i = 0; i < n; i++)
		free((void *)(uintptr_t)bodies[i].data);
}

static int64_t in_an_hour(void)
{
	return shmq_realtime() + 3600 * NS_PER_S;
}

static void finish(killing *k, uint32_t q, shmq_consumer *c, const shmq_message *m, uint32_t n)
{
	uint8_t ok[64];

	for (uint32_t i = 0; i < n; i++)
		k->page->fate[q][number_of(&m[i])] = EITHER;
	EQUAL(shmq_finish(c, m, n, ok, soon()), 0);
	for (uint32_t i = 0; i < n; i++)
		k->page->fate[q][number_of(&m[i])] = DONE;
}

/* ---- queues ---- */

static uint32_t make_queue(killing *k, shmq_broker *b, int fd, const char *channel, uint64_t *serial)
{
	uint32_t queue;

	EQUAL(shmq_queue_reserve(b, soon(), &queue, serial), 0);
	k->w->queues[*serial] = fd;
	k->page->new_queue = queue;
	k->page->new_serial = *serial;
	EQUAL(shmq_queue_create(b, fd, queue, *serial, k->topic, "t:c", 0, 0, 0, false, false), 0);
	EQUAL(MAPPED(k->w, b, shmq_queue_enter(b, queue, *serial, k->topic, channel, soon())), 0);
	return queue;
}

static void add_queue(killing *k, uint32_t queue, uint64_t serial, bool target)
{
	k->queue[k->n] = queue;
	k->serial[k->n] = serial;
	k->targets |= (uint32_t)target << k->n++;
	k->page->new_serial = 0;
}

static void add_channel(killing *k, const char *channel)
{
	uint64_t serial;
	uint32_t queue = make_queue(k, k->w->supervisor, memfd_create("q", MFD_CLOEXEC), channel, &serial);

	add_queue(k, queue, serial, true);
	(void)world_view(k->w, queue);
}

static void begin(killing *k, const operation *o, page *shared)
{
	static const char *const names[] = {"a", "b", "c"};

	memset(k, 0, sizeof(*k));
	memset(shared, 0, offsetof(page, disk));
	k->page = shared;
	k->w = world_start(small_limits(256, 64));
	k->fd = memfd_create("spare", MFD_CLOEXEC);
	k->other = memfd_create("other", MFD_CLOEXEC);
	k->topic = world_topic(k->w, "t", &k->generation);
	for (uint32_t i = 0; i < o->channels; i++)
		add_channel(k, names[i]);
	if (!o->channels)
		add_channel(k, NULL);
	k->b = world_attach(k->w, SHMQ_AS_CLIENT);
	EQUAL(shmq_producer_open(k->b, k->topic, k->generation, &k->p), 0);
	publish(k, k->b, k->p, 4, SMALL, 0);
	if (o->prepare)
		o->prepare(k);
}

static void end(killing *k)
{
	shmq_producer_close(k->p);
	EQUAL(MAPPED(k->w, k->b, shmq_broker_detach(k->b, soon())), 0);
	shmq_broker_close(k->b);
	close(k->other);
	if (!k->w->queues[k->page->new_serial] || k->w->queues[k->page->new_serial] != k->fd) {
		bool used = false;

		for (uint32_t i = 0; i < k->n; i++)
			used |= k->w->queues[k->serial[i]] == k->fd;
		if (!used)
			close(k->fd);
	}
	world_stop(k->w);
}

/* ---- repair ---- */

static void adopt_all(killing *k, shmq_broker *b)
{
	for (uint32_t i = 0; i < ld(&b->d->queues_committed); i++)
		if (ld(&b->entries[i].state) == SHMQ_ENTRY_LIVE)
			EQUAL(MAPPED(k->w, b, shmq_adopt(b, i, soon())), 0);
}

static void repair(killing *k, const operation *o, shmq_broker *b)
{
	uint32_t ignored;

	if (k->page->new_serial)
		k->w->queues[k->page->new_serial] = k->fd;
	if (o->supervisor) {
		EQUAL(shmq_supervise(b, &k->w->limits, soon()), 0);
		adopt_all(k, b);
	}
	world_reap(k->w, b, &ignored);
}

/* A child that does `what`, with a point armed; was it killed there? */
static bool child(killing *k, const operation *o, const char *point, uint32_t count, bool repairs)
{
	pid_t pid = fork();
	int status;

	CHECK(pid >= 0);
	if (!pid) {
		if (repairs)
			k->mine = world_attach(k->w, SHMQ_AS_SUPERVISOR);
		else if (o->ready)
			o->ready(k);
		shmq_killpoint_arm(point, count);
		if (repairs)
			repair(k, o, k->mine);
		else
			o->act(k);
		_exit(0);
	}
	EQUAL(waitpid(pid, &status, 0), pid);
	if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
		return true;
	if (!WIFEXITED(status) || WEXITSTATUS(status))
		fail("the child failed with status %x", status);
	return false;
}

/* ---- the promises ---- */

static void restore_some(killing *k, uint32_t queue)
{
	shmq_queue_desc *q = world_view(k->w, queue)->q;
	uint64_t from = ld(&q->disk_read), to = ld(&q->disk_write), used;
	uint32_t taken;

	CHECK(to <= sizeof(k->page->disk));
	if (ld(&q->spilling))
		fail("queue %u is spilling and nobody spills", queue);
	EQUAL(shmq_restore(k->w->supervisor, queue, k->page->disk + from, to - from, from, to, soon(),
	                   &taken, &used),
	      0);
	if (!taken)
		fail("nothing can be restored");
}

/* What is left of the chunk to memory; false: nothing. */
static bool load_chunk(killing *k, shmq_broker *b, uint32_t most)
{
	shmq_queue_desc *q = world_view(k->w, k->queue[0])->q;
	uint64_t read = ld(&q->deferred_read), at = 0, bytes = 0;
	uint32_t next = read >> SHMQ_CHUNK_SHIFT == 1 ? (uint32_t)(read & 0xffffff) : 0, n, taken;

	if (!ld(&q->deferred_write) || ld(&q->deferred_gone) || next >= k->page->chunk_count)
		return false;
	n = k->page->chunk_count - next;
	if (n > most)
		n = most;
	for (uint32_t i = 0; i < next; i++)
		at += k->page->chunk_lengths[i];
	for (uint32_t i = next; i < next + n; i++)
		bytes += k->page->chunk_lengths[i];
	EQUAL(shmq_chunk_load(b, k->queue[0], k->page->chunk + at, bytes, k->page->chunk_dues + next, n,
	                      UINT64_C(1) << SHMQ_CHUNK_SHIFT | next, soon(), &taken),
	      0);
	EQUAL(taken, n);
	return true;
}

/* Everything out of a queue, each message once, in order; all of it finished. */
static void drain(killing *k, const operation *o, uint32_t q, uint8_t *seen)
{
	shmq_consumer *c = world_consumer(k->w, k->b, k->queue[q], k->serial[q], 1000);
	shmq_queue_desc *desc = world_view(k->w, k->queue[q])->q;
	uint32_t got, last = 0, expired, due, number;
	bool first = true, timed = false;
	shmq_message m[64];
	int r;

	for (;;) {
		r = shmq_take(c, m, 64, soon(), &got);
		if (r == SHMQ_EMPTY && on_disk(desc)) {
			restore_some(k, k->queue[q]);
			continue;
		}
		if (r == SHMQ_EMPTY) {
			EQUAL(shmq_expire(k->w->supervisor, k->queue[q], 0, INT64_MAX, 1000, soon(), &expired,
			                  &due),
			      0);
			timed = true; /* what was deferred comes out of its turn */
			if (!due && !(q == 0 && load_chunk(k, k->w->supervisor, 8)))
				break;
			continue;
		}
		EQUAL(r, 0);
		for (uint32_t i = 0; i < got; i++) {
			number = number_of(&m[i]);
			if (number >= k->page->next)
				fail("message %u was never published", number);
			if (seen[number]++)
				fail("queue %u: message %u is delivered twice", q, number);
			if (!o->out_of_order && !timed && !first && number <= last)
				fail("queue %u: message %u is delivered behind %u", q, number, last);
			last = number;
			first = false;
		}
		EQUAL(shmq_finish(c, m, got, NULL, soon()), 0);
	}
	EQUAL(shmq_consumer_close(c, soon()), 0);
	shmq_consumer_free(c);
	if (ring_count(&desc->free_head, &desc->free_tail) != ld(&desc->slots_committed))
		fail("queue %u: %u slots free of %u", q, ring_count(&desc->free_head, &desc->free_tail),
		     ld(&desc->slots_committed));
}

static void check_sound(killing *k, const char *when)
{
	for (uint32_t q = 0; q < k->n; q++) {
		const char *wrong = "";

		if (ld(&k->b->entries[k->queue[q]].state) == SHMQ_ENTRY_LIVE)
			wrong = checker_queue(k->w->supervisor->base,
			                      world_view(k->w, k->queue[q])->base);
		if (*wrong)
			fail("%s: queue %u: %s", when, q, wrong);
	}
}

static void check_fates(killing *k, const operation *o)
{
	uint32_t in = 0, group = 0;

	for (uint32_t q = 0; q < k->n; q++) {
		uint8_t seen[MESSAGES] = {0};

		drain(k, o, q, seen);
		for (uint32_t i = 0; i < k->page->next; i++) {
			enum fate fate = k->page->fate[q][i];

			if (fate == GROUP) {
				group++;
				in += seen[i];
			}
			if (fate == DUE && !seen[i])
				fail("queue %u: message %u is lost", q, i);
			if ((fate == NEVER || fate == DONE) && seen[i])
				fail("queue %u: message %u comes %s", q, i,
				     fate == DONE ? "back after its finish" : "from nowhere");
			if (fate != NEVER)
				k->page->fate[q][i] = DONE;
		}
	}
	if (in && in != group)
		fail("the publish is there %u times of %u", in, group);
}

static void check_locks(killing *k)
{
	shmq_broker *s = k->w->supervisor;

	if (lock_take(&s->d->registry, 0))
		fail("the registry is locked");
	lock_drop(&s->d->registry);
	for (uint32_t t = 0; t < ld(&s->d->topics_committed); t++) {
		if (lock_take(&s->topics[t].publish, 0))
			fail("topic %u is locked", t);
		lock_drop(&s->topics[t].publish);
	}
	for (uint32_t q = 0; q < k->n; q++) {
		shmq_lock_desc *lock = &world_view(k->w, k->queue[q])->q->deliver;

		if (lock_take(lock, 0))
			fail("queue %u is locked", q);
		lock_drop(lock);
	}
}

static void verify(killing *k, const operation *o)
{
	if (k->page->new_serial && ld(&k->b->entries[k->page->new_queue].state) == SHMQ_ENTRY_LIVE &&
	    k->b->entries[k->page->new_queue].serial == k->page->new_serial)
		add_queue(k, k->page->new_queue, k->page->new_serial, true);
	check_sound(k, "repaired");
	if (o->after)
		o->after(k);
	if (k->waits) {
		wait_withdraw(&world_view(k->w, k->queue[0])->q->takers, k->bell);
		bell_put(k->b, k->bell);
	}
	if (k->c) {
		EQUAL(shmq_consumer_close(k->c, soon()), 0);
		shmq_consumer_free(k->c);
	}
	check_locks(k);
	check_sound(k, "before draining");
	check_fates(k, o);
	check_sound(k, "drained");
	if (!k->n)
		return;
	publish(k, k->b, k->p, 2, SMALL, 0);
	publish(k, k->b, k->p, 1, LARGE, 0);
	check_sound(k, "published again");
	check_fates(k, o);
	check_sound(k, "drained again");
}

static bool run(const operation *o, const char *point, uint32_t count, page *shared)
{
	static uint32_t turn;
	killing k;
	bool died;

	operating = o->name;
	dying = point ? point : "nowhere";
	passing = count;
	begin(&k, o, shared);
	died = child(&k, o, point, count, false);
	runs++;
	if (died || !point) {
		for (uint32_t i = 0; died && i < REPAIRERS; i++, turn++)
			repairer_deaths += child(&k, o, points[repair_points[turn % repair_count]],
			                         1 + turn / repair_count % 3, true);
		repair(&k, o, k.w->supervisor);
		verify(&k, o);
	} else {
		repair(&k, o, k.w->supervisor);
		if (k.c) {
			EQUAL(shmq_consumer_close(k.c, soon()), 0);
			shmq_consumer_free(k.c);
		}
	}
	end(&k);
	return died;
}

/* ---- the operations ---- */

static void come(killing *k)
{
	k->mine = world_attach(k->w, SHMQ_AS_CLIENT);
	EQUAL(shmq_producer_open(k->mine, k->topic, k->generation, &k->producer), 0);
}

static void come_to_take(killing *k)
{
	come(k);
	k->consumer = world_consumer(k->w, k->mine, k->queue[0], k->serial[0], 100);
}

static void take_n(killing *k, uint32_t n)
{
	EQUAL(shmq_take(k->consumer, k->m, n, soon(), &k->got), 0);
	EQUAL(k->got, n);
}

static void come_and_take(killing *k)
{
	come_to_take(k);
	take_n(k, 3);
}

static void come_to_supervise(killing *k)
{
	k->mine = world_attach(k->w, SHMQ_AS_SUPERVISOR);
	EQUAL(shmq_supervise(k->mine, &k->w->limits, soon()), 0);
	for (uint32_t q = 0; q < k->n; q++)
		EQUAL(shmq_broker_map(k->mine, k->queue[q], k->serial[q], k->w->queues[k->serial[q]]), 0);
}

static void publish_one(killing *k)
{
	publish(k, k->mine, k->producer, 1, SMALL, 0);
}

static void publish_three(killing *k)
{
	publish(k, k->mine, k->producer, 3, SMALL, 0);
}

static void publish_large(killing *k)
{
	publish(k, k->mine, k->producer, 1, LARGE, 0);
}

static void publish_two_large(killing *k)
{
	publish(k, k->mine, k->producer, 2, LARGE, 0);
}

static void publish_deferred(killing *k)
{
	publish(k, k->mine, k->producer, 2, SMALL, in_an_hour());
}

static void fill_first_slots(killing *k)
{
	while (k->page->next < 126)
		publish(k, k->b, k->p, 1, SMALL, 0);
}

static void publish_five(killing *k)
{
	publish(k, k->mine, k->producer, 5, SMALL, 0);
}

static void wait_on_first(killing *k)
{
	EQUAL(bell_get(k->b, &k->bell), 0);
	wait_announce(&world_view(k->w, k->queue[0])->q->takers, k->bell);
	k->waits = true;
}

/* The waiter was rung, or its bit is still set and the next publish will ring. */
static void waiter_was_rung(killing *k)
{
	shmq_waitset_desc *takers = &world_view(k->w, k->queue[0])->q->takers;

	if (sem_trywait(&k->b->waiters[k->bell].bell))
		fail("a waiter sleeps on (its bit is %sset)",
		     ld(&takers->words[k->bell / 64]) >> k->bell % 64 & 1 ? "" : "not ");
}

static void loan_begin_one(killing *k)
{
	EQUAL(MAPPED(k->w, k->mine, shmq_loan_begin(k->producer, 500, soon(), &k->loan)), 0);
}

static void loan_commit_one(killing *k)
{
	uint32_t number = k->page->next++;
	uint8_t *body = body_of(number, 500);
	uint64_t id;

	set_fate(k, number, 1, GROUP);
	memcpy(shmq_loan_data(k->loan), body, 500);
	EQUAL(MAPPED(k->w, k->mine, shmq_loan_commit(k->loan, 0, soon(), &id)), 0);
	set_fate(k, number, 1, DUE);
	shmq_loan_free(k->loan);
	free(body);
}

static void lend_and_commit(killing *k)
{
	loan_begin_one(k);
	loan_commit_one(k);
}

static void lend_and_cancel(killing *k)
{
	loan_begin_one(k);
	EQUAL(shmq_loan_cancel(k->loan, soon()), 0);
	shmq_loan_free(k->loan);
}

static void lend_then_a_channel_comes(killing *k)
{
	uint64_t serial;
	uint32_t queue;

	come(k);
	loan_begin_one(k);
	queue = make_queue(k, k->mine, k->fd, "new", &serial);
	add_queue(k, queue, serial, true);
	k->page->new_serial = serial;
}

static void take_one(killing *k)
{
	take_n(k, 1);
}

static void come_now_and_take_one(killing *k)
{
	k->consumer = world_consumer(k->w, k->mine, k->queue[0], k->serial[0], 100);
	take_n(k, 1);
}

static void take_four(killing *k)
{
	take_n(k, 4);
}

static void twelve_more(killing *k)
{
	publish(k, k->b, k->p, 12, SMALL, 0);
}

static void live_consumer(killing *k, uint32_t n)
{
	k->c = world_consumer(k->w, k->b, k->queue[0], k->serial[0], 100);
	EQUAL(shmq_take(k->c, k->m, n, soon(), &k->got), 0);
}

static void some_were_requeued(killing *k)
{
	live_consumer(k, 2);
	EQUAL(shmq_requeue(k->c, k->m, 2, 0, NULL, soon()), 0);
}

static void some_are_deferred(killing *k)
{
	publish(k, k->b, k->p, 2, SMALL, in_an_hour());
}

static void finish_one_message(killing *k)
{
	finish(k, 0, k->consumer, k->m, 1);
}

static void finish_three(killing *k)
{
	finish(k, 0, k->consumer, k->m, 3);
}

static void pin_one(killing *k)
{
	EQUAL(shmq_pin(k->consumer, k->m, soon()), 0);
}

static void come_take_and_pin(killing *k)
{
	come_and_take(k);
	pin_one(k);
}

static void come_take_pin_and_finish(killing *k)
{
	come_take_and_pin(k);
	finish_three(k);
}

static void unpin_one(killing *k)
{
	EQUAL(shmq_unpin(k->consumer, k->m, soon()), 0);
}

static void requeue_three(killing *k)
{
	EQUAL(shmq_requeue(k->consumer, k->m, 3, 0, NULL, soon()), 0);
}

static void requeue_three_later(killing *k)
{
	EQUAL(shmq_requeue(k->consumer, k->m, 3, 60 * NS_PER_S, NULL, soon()), 0);
}

static void touch_three(killing *k)
{
	EQUAL(shmq_touch(k->consumer, k->m, 3, NULL, soon()), 0);
}

/* The order counter runs ahead of the publish counter. */
static void much_came_and_went(killing *k)
{
	for (int i = 0; i < 6; i++) {
		live_consumer(k, 4);
		EQUAL(shmq_consumer_close(k->c, soon()), 0);
		shmq_consumer_free(k->c);
		k->c = NULL;
	}
	live_consumer(k, 4);
	finish(k, 0, k->c, k->m, 4);
	twelve_more(k);
}

static void take_twelve(killing *k)
{
	take_n(k, 12);
}

static void take_alive(killing *k)
{
	live_consumer(k, 3);
}

static void expire_in_flight(killing *k)
{
	uint32_t expired, due;

	EQUAL(shmq_expire(k->mine, k->queue[0], shmq_now() + 100 * NS_PER_S, 0, 100, soon(), &expired,
	                  &due),
	      0);
	EQUAL(expired, 3);
}

static void expire_due(killing *k)
{
	uint32_t expired, due;

	EQUAL(shmq_expire(k->mine, k->queue[0], 0, INT64_MAX, 100, soon(), &expired, &due), 0);
	EQUAL(due, 2);
}

static void advance_four(killing *k)
{
	uint32_t moved;

	EQUAL(shmq_advance(k->mine, k->queue[0], 4, soon(), &moved), 0);
	EQUAL(moved, 4);
}

static uint32_t spill_slots[64], spill_lengths[64];
static uint64_t spill_positions[64];
static shmq_spill spill = {.slots = spill_slots, .lengths = spill_lengths, .positions = spill_positions};

static void spill_start(killing *k, shmq_broker *b, enum shmq_spill_from from, uint32_t n)
{
	uint64_t at = k->page->written;

	EQUAL(shmq_spill_begin(b, k->queue[0], from, n, 1 << 16, soon(), &spill), 0);
	EQUAL(shmq_spill_encode(b, &spill, k->page->disk + at), 0);
	for (uint32_t i = 0; i < spill.count; at += spill_lengths[i++])
		spill_positions[i] = at;
}

static void spill_finish(killing *k, shmq_broker *b)
{
	EQUAL(shmq_spill_end(b, &spill, k->page->written + spill.bytes, true, soon()), 0);
	k->page->written += spill.bytes;
}

static void spill_six(killing *k)
{
	spill_start(k, k->mine, SHMQ_SPILL_READY, 6);
	spill_finish(k, k->mine);
}

static void spill_in_vain(killing *k)
{
	spill_start(k, k->mine, SHMQ_SPILL_READY, 6);
	EQUAL(shmq_spill_end(k->mine, &spill, 0, false, soon()), 0);
}

static void a_bit_of_everything(killing *k)
{
	uint32_t moved;

	twelve_more(k);
	some_are_deferred(k);
	live_consumer(k, 4);
	EQUAL(shmq_requeue(k->c, k->m, 1, 0, NULL, soon()), 0);
	EQUAL(shmq_requeue(k->c, k->m + 1, 1, 60 * NS_PER_S, NULL, soon()), 0);
	EQUAL(shmq_advance(k->w->supervisor, k->queue[0], 2, soon(), &moved), 0);
	some_are_deferred(k);
}

static void flush(killing *k)
{
	spill_start(k, k->mine, SHMQ_SPILL_ALL, 64);
	spill_finish(k, k->mine);
}

static void spill_what_came_back(killing *k)
{
	spill_start(k, k->mine, SHMQ_SPILL_RETURNED, 2);
	EQUAL(spill.count, 2);
	spill_finish(k, k->mine);
}

static void come_and_spill(killing *k)
{
	come_to_supervise(k);
	advance_four(k);
	spill_six(k);
}

static void restore_six(killing *k)
{
	uint64_t used;
	uint32_t taken;

	EQUAL(shmq_restore(k->mine, k->queue[0], k->page->disk, k->page->written, 0, k->page->written,
	                   soon(), &taken, &used),
	      0);
	EQUAL(taken, 6);
}

static void come_spill_and_restore(killing *k)
{
	come_and_spill(k);
	restore_six(k);
}

static void unrestore_six(killing *k)
{
	uint32_t count;

	EQUAL(shmq_unrestore(k->mine, k->queue[0], soon(), &count), 0);
	EQUAL(count, 6);
}

/* Of what was read from disk some is in flight, the rest waits; more is still there. */
static void come_and_read_some(killing *k)
{
	uint64_t half, used;
	uint32_t taken;

	come_and_spill(k);
	half = k->page->written;
	spill_six(k);
	EQUAL(shmq_restore(k->mine, k->queue[0], k->page->disk, half, 0, half, soon(), &taken, &used), 0);
	EQUAL(taken, 6);
	k->consumer = world_consumer(k->w, k->mine, k->queue[0], k->serial[0], 100);
	take_n(k, 7);
	finish(k, 0, k->consumer, k->m, 4);
}

static void ahead_start(killing *k)
{
	EQUAL(shmq_spill_begin(k->mine, k->queue[0], SHMQ_SPILL_AHEAD, 64, 0, soon(), &spill), 0);
	EQUAL(spill.count, 6);
	EQUAL(spill.position, 0);
	EQUAL(shmq_spill_encode(k->mine, &spill, k->page->disk + spill.position), 0);
}

static void write_ahead(killing *k)
{
	ahead_start(k);
	EQUAL(shmq_spill_end(k->mine, &spill, 0, true, soon()), 0);
}

static void write_ahead_in_vain(killing *k)
{
	ahead_start(k);
	EQUAL(shmq_spill_end(k->mine, &spill, 0, false, soon()), 0);
}

static void more_are_deferred(killing *k)
{
	some_are_deferred(k);
	some_are_deferred(k);
}

static void chunk_start(killing *k, shmq_broker *b)
{
	EQUAL(shmq_chunk_begin(b, k->queue[0], 1, INT64_MIN, 3, 1 << 10, soon(), &spill), 0);
	EQUAL(spill.count, 3);
	EQUAL(shmq_spill_encode(b, &spill, k->page->chunk), 0);
	for (uint32_t i = 0; i < spill.count; i++) {
		k->page->chunk_lengths[i] = spill_lengths[i];
		k->page->chunk_dues[i] = (int64_t)spill_positions[i];
	}
	k->page->chunk_count = spill.count;
}

static void write_chunk(killing *k)
{
	chunk_start(k, k->mine);
	EQUAL(shmq_spill_end(k->mine, &spill, 0, true, soon()), 0);
}

static void write_chunk_in_vain(killing *k)
{
	chunk_start(k, k->mine);
	EQUAL(shmq_spill_end(k->mine, &spill, 0, false, soon()), 0);
}

static void come_and_write_chunk(killing *k)
{
	come_to_supervise(k);
	write_chunk(k);
}

static void read_chunk(killing *k)
{
	CHECK(load_chunk(k, k->mine, 2));
	CHECK(load_chunk(k, k->mine, 2));
	CHECK(!load_chunk(k, k->mine, 2));
}

static void everything_and_a_chunk(killing *k)
{
	more_are_deferred(k);
	chunk_start(k, k->w->supervisor);
	EQUAL(shmq_spill_end(k->w->supervisor, &spill, 0, true, soon()), 0);
	CHECK(load_chunk(k, k->w->supervisor, 1));
}

static void half_a_chunk(killing *k)
{
	more_are_deferred(k);
	chunk_start(k, k->w->supervisor);
}

/* The supervisor comes to the end of its chunk: what empty took is gone, the rest is written. */
static void the_chunk_ends(killing *k)
{
	int r = shmq_spill_end(k->w->supervisor, &spill, 0, true, soon());

	CHECK(r == 0 || r == SHMQ_GONE);
	if (r)
		k->page->chunk_count = 0;
}

/* A backlog of all kinds, and two channels made while the topic was paused. */
static void a_backlog_to_move(killing *k)
{
	uint32_t moved;

	some_are_deferred(k);
	EQUAL(shmq_advance(k->w->supervisor, k->queue[0], 2, soon(), &moved), 0);
	EQUAL(shmq_topic_pause(k->b, k->topic, k->generation, true, soon()), 0);
	add_channel(k, "a");
	add_channel(k, "b");
	EQUAL(shmq_topic_pause(k->b, k->topic, k->generation, false, soon()), 0);
	k->targets = 6;
	for (uint32_t i = 0; i < k->page->next; i++) {
		k->page->fate[0][i] = NEVER;
		k->page->fate[1][i] = k->page->fate[2][i] = DUE;
	}
}

static void pump(killing *k)
{
	uint32_t moved;

	EQUAL(MAPPED(k->w, k->mine, shmq_pump(k->mine, k->topic, k->generation, 100, soon(), &moved)), 0);
	EQUAL(moved, 6);
}

static void pump_the_rest(killing *k)
{
	uint32_t moved;

	(void)MAPPED(k->w, k->w->supervisor,
	             shmq_pump(k->w->supervisor, k->topic, k->generation, 100, soon(), &moved));
}

static void pause_and_go_on(killing *k)
{
	EQUAL(shmq_topic_pause(k->mine, k->topic, k->generation, true, soon()), 0);
	EQUAL(shmq_topic_pause(k->mine, k->topic, k->generation, false, soon()), 0);
	EQUAL(MAPPED(k->w, k->mine,
	             shmq_channel_pause(k->mine, k->queue[0], k->serial[0], true, soon())),
	      0);
	EQUAL(shmq_channel_pause(k->mine, k->queue[0], k->serial[0], false, soon()), 0);
}

static void let_go_on(killing *k)
{
	EQUAL(shmq_topic_pause(k->b, k->topic, k->generation, false, soon()), 0);
	EQUAL(MAPPED(k->w, k->b, shmq_channel_pause(k->b, k->queue[0], k->serial[0], false, soon())), 0);
}

static void everything_and_a_spill(killing *k)
{
	a_bit_of_everything(k);
	spill_start(k, k->w->supervisor, SHMQ_SPILL_READY, 5);
}

static void empty_it(killing *k)
{
	uint64_t dropped;

	for (uint32_t i = 0; i < k->page->next; i++)
		k->page->fate[0][i] = EITHER;
	EQUAL(MAPPED(k->w, k->mine,
	             shmq_queue_empty(k->mine, k->queue[0], k->serial[0], soon(), &dropped)),
	      0);
	EQUAL(dropped, k->page->next);
	for (uint32_t i = 0; i < k->page->next; i++)
		k->page->fate[0][i] = DONE;
}

/* The supervisor comes to the end of its batch: what empty took is gone, the rest is written. */
static void the_spill_ends(killing *k)
{
	int r = shmq_spill_end(k->w->supervisor, &spill, spill.bytes, true, soon());

	CHECK(r == 0 || r == SHMQ_GONE);
	if (!r)
		k->page->written = spill.bytes;
}

static void create_topic(killing *k)
{
	uint32_t topic, generation;

	EQUAL(shmq_topic_create(k->mine, "another", 0, soon(), &topic, &generation), 0);
}

static void create_topic_again(killing *k)
{
	uint32_t topic, generation, again, n = 0;

	EQUAL(shmq_topic_create(k->w->supervisor, "another", 0, soon(), &topic, &generation), 0);
	EQUAL(shmq_topic_find(k->b, "another", &again, &generation), 0);
	EQUAL(topic, again);
	for (uint32_t i = 0; i < ld(&k->b->d->topics_committed); i++)
		n += ld(&k->b->topics[i].state) == SHMQ_ENTRY_LIVE;
	EQUAL(n, 2);
}

static void create_channel(killing *k)
{
	uint64_t serial;

	(void)make_queue(k, k->mine, k->fd, "new", &serial);
}

/* Not entered: nobody accepts its segment if it is not ready, and it can be made anew. */
static void create_channel_again(killing *k)
{
	uint64_t serial;
	uint32_t queue;

	if (!shmq_queue_find(k->b, k->topic, "new", &queue, &serial))
		return;
	add_queue(k, 0, 0, true);
	k->n--;
	EQUAL(ftruncate(k->fd, 0), 0);
	queue = make_queue(k, k->w->supervisor, k->fd, "new", &serial);
	add_queue(k, queue, serial, true);
}

static void take_over(killing *k)
{
	uint64_t serial;
	uint32_t queue;

	EQUAL(MAPPED(k->w, k->mine, shmq_queue_take_over(k->mine, k->topic, "a", soon(), &queue, &serial)),
	      0);
}

static void take_over_again(killing *k)
{
	uint64_t serial;
	uint32_t queue;
	int r = MAPPED(k->w, k->w->supervisor,
	               shmq_queue_take_over(k->w->supervisor, k->topic, "a", soon(), &queue, &serial));

	CHECK(r == 0 || r == SHMQ_INVALID);
	EQUAL(shmq_queue_find(k->b, k->topic, NULL, &queue, &serial), SHMQ_GONE);
	EQUAL(shmq_queue_find(k->b, k->topic, "a", &queue, &serial), 0);
	EQUAL(queue, k->queue[0]);
	EQUAL(ld(&world_view(k->w, queue)->q->base_pending), 1);
	EQUAL(shmq_queue_renamed(k->w->supervisor, queue, "t:a", soon()), 0);
}

static void remove_channel(killing *k)
{
	for (uint32_t i = 0; i < k->page->next; i++)
		k->page->fate[1][i] = EITHER;
	EQUAL(MAPPED(k->w, k->mine, shmq_queue_remove(k->mine, k->queue[1], k->serial[1], false, soon())), 0);
}

static void remove_channel_again(killing *k)
{
	int r = MAPPED(k->w, k->w->supervisor,
	               shmq_queue_remove(k->w->supervisor, k->queue[1], k->serial[1], false, soon()));

	CHECK(r == 0 || r == SHMQ_GONE);
	EQUAL(ld(&k->b->entries[k->queue[1]].state), SHMQ_ENTRY_FREE);
	k->n = 1;
	k->targets = 1;
}

static void remove_topic(killing *k)
{
	EQUAL(MAPPED(k->w, k->mine, shmq_queue_remove(k->mine, k->queue[0], k->serial[0], false, soon())), 0);
	EQUAL(shmq_topic_remove(k->mine, k->topic, k->generation, soon()), 0);
}

static void remove_topic_again(killing *k)
{
	uint32_t topic, generation;
	uint64_t id;
	shmq_body body = {"x", 1};

	(void)MAPPED(k->w, k->w->supervisor,
	             shmq_queue_remove(k->w->supervisor, k->queue[0], k->serial[0], false, soon()));
	if (!shmq_topic_find(k->b, "t", &topic, &generation))
		EQUAL(shmq_topic_remove(k->w->supervisor, topic, generation, soon()), 0);
	EQUAL(shmq_topic_find(k->b, "t", &topic, &generation), SHMQ_GONE);
	EQUAL(shmq_publish(k->p, &body, 1, 0, soon(), &id), SHMQ_GONE);
	k->n = 0;
}

static void come_and_hold_everything(killing *k)
{
	uint32_t ticket;

	come_take_and_pin(k);
	finish(k, 0, k->consumer, k->m, 1);
	loan_begin_one(k);
	EQUAL(bell_get(k->mine, &k->bell), 0);
	wait_announce(&ld(&k->mine->maps[k->queue[0]])->q->takers, k->bell);
	EQUAL(shmq_request_post(k->mine, SHMQ_CREATE_TOPIC, "u", NULL, soon(), &ticket), 0);
}

static void leave(killing *k)
{
	EQUAL(MAPPED(k->w, k->mine, shmq_broker_detach(k->mine, soon())), 0);
}

static void close_consumer(killing *k)
{
	EQUAL(shmq_consumer_close(k->consumer, soon()), 0);
}

static void wait_a_moment(killing *k)
{
	EQUAL(shmq_consumer_wait(k->consumer, shmq_now()), SHMQ_TIMEOUT);
}

static void wait_with_a_waiter(killing *k)
{
	shmq_waiter *waiter;
	uint32_t ready, count;
	int r;

	EQUAL(shmq_waiter_open(k->mine, &waiter), 0);
	do
		r = shmq_waiter_wait(waiter, &k->consumer, 1, shmq_now() + NS_PER_MS, &ready, &count);
	while (r == 0 && !count); /* a ring of the detach before it */
	EQUAL(r, SHMQ_TIMEOUT);
	shmq_waiter_close(waiter);
	shmq_waiter_free(waiter);
}

static void nothing_is_there(killing *k)
{
	live_consumer(k, 4);
	finish(k, 0, k->c, k->m, k->got);
}

static void post_request(killing *k)
{
	uint32_t ticket;

	EQUAL(shmq_request_post(k->mine, SHMQ_CREATE_TOPIC, "u", NULL, soon(), &ticket), 0);
}

/* Abandoned ones are freed; nothing of the dead is left to answer. */
static void no_request_is_left(killing *k)
{
	shmq_request request;

	EQUAL(shmq_request_next(k->w->supervisor, soon(), &request), SHMQ_EMPTY);
	for (uint32_t i = 0; i < SHMQ_REQUESTS; i++)
		EQUAL(ld(&k->b->requests[i].state), SHMQ_REQUEST_FREE);
}

/* Somebody dies in the parent's preparation, holding locks if `locks`. */
static void a_death(killing *k, void (*ready)(killing *), unsigned locks)
{
	pid_t pid = fork();
	int status;

	if (!pid) {
		ready(k);
		if (locks & 1)
			EQUAL(lock_take(&k->mine->topics[k->topic].publish, 0), 0);
		if (locks & 2)
			EQUAL(lock_take(&ld(&k->mine->maps[k->queue[0]])->q->deliver, 0), 0);
		raise(SIGKILL);
	}
	EQUAL(waitpid(pid, &status, 0), pid);
	CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

/* ---- leases ---- */

static void lessee_of(killing *k, shmq_broker *b)
{
	EQUAL(MAPPED(k->w, b,
	             shmq_lessee_open(b, k->queue[0], k->serial[0], "reader", NS_PER_S, 1, soon(),
	                              &k->lessee)),
	      0);
}

static void lease_n(killing *k, shmq_broker *b, uint32_t n)
{
	EQUAL(shmq_lease_take(b, &k->lessee, k->lease.id, n, UINT64_MAX, 2, NULL, soon(), &k->lease), 0);
	EQUAL(k->lease.count, n);
}

static void come_to_lease(killing *k)
{
	come(k);
	lessee_of(k, k->mine);
}

static void lease_three(killing *k)
{
	lease_n(k, k->mine, 3);
}

static void come_and_lease(killing *k)
{
	come_to_lease(k);
	lease_n(k, k->mine, 2);
	lease_n(k, k->mine, 1);
}

static void lease_of_one_alive(killing *k)
{
	lessee_of(k, k->b);
	lease_n(k, k->b, 2);
	lease_n(k, k->b, 1);
}

static void open_a_lessee_again(killing *k)
{
	lessee_of(k, k->mine);
}

static void finish_the_leases(killing *k)
{
	uint64_t messages;

	for (uint32_t i = 0; i < 3; i++)
		k->page->fate[0][i] = EITHER;
	EQUAL(shmq_lease_finish(k->mine, &k->lessee, k->lease.id, soon(), &messages), 0);
	EQUAL(messages, 3);
	for (uint32_t i = 0; i < 3; i++)
		k->page->fate[0][i] = DONE;
}

static void return_the_leases(killing *k)
{
	uint64_t messages;

	EQUAL(shmq_lease_return(k->mine, &k->lessee, k->lease.id, soon(), &messages), 0);
	EQUAL(messages, 1);
	EQUAL(shmq_lease_return(k->mine, &k->lessee, k->lease.parent, soon(), &messages), 0);
	EQUAL(messages, 2);
}

/* Four that came back, and the six on disk behind them. */
static void lease_ten(killing *k)
{
	uint64_t at[2] = {0, 0};
	shmq_run run = {0, k->page->written, k->page->written - 6 * 30, 6, 2, at};

	for (uint32_t i = 0; i < 3; i++)
		at[1] += spill_lengths[i];
	EQUAL(shmq_lease_take(k->mine, &k->lessee, 0, 64, UINT64_MAX, 2, &run, soon(), &k->lease), 0);
	EQUAL(k->lease.count, 10);
	EQUAL(k->lease.on_disk, 6);
}

static void come_spill_and_lease(killing *k)
{
	come_and_spill(k);
	lessee_of(k, k->mine);
}

static void come_spill_and_lease_ten(killing *k)
{
	come_spill_and_lease(k);
	lease_ten(k);
}

static void finish_the_ten(killing *k)
{
	uint64_t messages;

	for (uint32_t i = 0; i < 10; i++)
		k->page->fate[0][i] = EITHER;
	EQUAL(shmq_lease_finish(k->mine, &k->lessee, k->lease.id, soon(), &messages), 0);
	EQUAL(messages, 10);
	for (uint32_t i = 0; i < 10; i++)
		k->page->fate[0][i] = DONE;
}

static void return_the_ten(killing *k)
{
	uint64_t messages;

	EQUAL(shmq_lease_return(k->mine, &k->lessee, k->lease.id, soon(), &messages), 0);
	EQUAL(messages, 10);
}

static void expire_leases(killing *k)
{
	uint32_t expired, due;

	EQUAL(shmq_expire(k->mine, k->queue[0], shmq_now() + 100 * NS_PER_S, 0, 100, soon(), &expired,
	                  &due),
	      0);
	EQUAL(ld(&world_view(k->w, k->queue[0])->q->leased), 0);
}

/* A lease is whole, and reads the same; then all of them go back. */
static void leases_are_whole(killing *k)
{
	shmq_map *map = world_view(k->w, k->queue[0]);
	uint64_t ids[64];
	int64_t times[64];
	int32_t attempts[64], offsets[65];
	uint32_t expired, due, leased = 0;
	static uint8_t data[1 << 16];

	for (uint32_t i = 0; ld(&map->q->leases_committed) && i < SHMQ_LEASES; i++) {
		uint64_t word = ld(&map->leases[i].word), size;
		uint32_t n = map->leases[i].count, rows = 0;

		if (!word)
			continue;
		if ((word & 0xff) != SHMQ_LEASE_HELD)
			fail("lease %llu is in state %u", (unsigned long long)(word >> 8),
			     (unsigned)(word & 0xff));
		for (uint32_t p = 0; p < map->leases[i].parts; p++) {
			shmq_lease_cursor c;
			uint32_t count;

			EQUAL(shmq_lease_open(k->w->supervisor, k->queue[0], k->serial[0], word >> 8, p, &c), 0);
			EQUAL(shmq_lease_measure(k->w->supervisor, &c, 64, sizeof(data), &count, &size), 0);
			EQUAL(shmq_lease_copy(k->w->supervisor, &c, count, size, ids, times, attempts, offsets,
			                      data),
			      0);
			EQUAL(c.left, 0);
			for (uint32_t r = 0; r < count; r++)
				CHECK(attempts[r] == 1 || attempts[r] == 2); /* the second: it was requeued */
			rows += count;
		}
		EQUAL(rows, n);
		leased += n;
		if (map->leases[i].on_disk) {
			EQUAL(ld(&map->q->run.lease), word >> 8);
			EQUAL(map->q->run.from, ld(&map->q->disk_read));
			EQUAL(map->q->run.count, map->leases[i].on_disk);
		}
	}
	EQUAL(ld(&map->q->leased), leased);
	EQUAL(shmq_expire(k->w->supervisor, k->queue[0], INT64_MAX - 1, 0, 1000, soon(), &expired, &due), 0);
	EQUAL(ld(&map->q->leased), 0);
}

/* ---- marks ---- */

static int publish_two_marked(killing *k, shmq_broker *b, shmq_producer *p)
{
	shmq_mark mark = {.key = {7, 8}, .epoch = 0, .after = 0, .upto = 2};
	uint32_t first = k->page->marked;
	shmq_body bodies[2];
	uint64_t id;
	int r;

	if (!first) {
		first = k->page->marked = k->page->next;
		k->page->next += 2;
	}
	for (uint32_t i = 0; i < 2; i++)
		bodies[i] = (shmq_body){body_of(first + i, SMALL), SMALL};
	set_fate(k, first, 2, GROUP);
	r = MAPPED(k->w, b, shmq_publish_marked(p, bodies, 2, &mark, soon(), &id));
	set_fate(k, first, 2, DUE);
	for (uint32_t i = 0; i < 2; i++)
		free((void *)(uintptr_t)bodies[i].data);
	return r;
}

static void publish_marked(killing *k)
{
	EQUAL(publish_two_marked(k, k->mine, k->producer), 0);
}

/* Again, as after a death: it goes through if it had not. */
static void publish_marked_again(killing *k)
{
	int r = publish_two_marked(k, k->b, k->p);

	if (r && r != SHMQ_REPEATED)
		fail("the second publish is answered %d", r);
	EQUAL(publish_two_marked(k, k->b, k->p), SHMQ_REPEATED);
}

/* What a death right after the commit word leaves. */
static void come_and_publish_half_marked(killing *k)
{
	shmq_writer_desc *w;

	come(k);
	publish_marked(k);
	w = &k->mine->writers[0];
	w->epoch = w->rows = 0;
	st(&w->next_seq, ld(&k->mine->topics[k->topic].committed));
}

static void somebody_died_marking(killing *k)
{
	a_death(k, come_and_publish_half_marked, 1);
}

static void publish_after_the_mark(killing *k)
{
	EQUAL(publish_two_marked(k, k->mine, k->producer), SHMQ_REPEATED);
}

static void somebody_died_leasing(killing *k)
{
	a_death(k, come_and_lease, 0);
}

static void somebody_died(killing *k)
{
	a_death(k, come_and_hold_everything, 0);
}

static void somebody_died_with_both_locks(killing *k)
{
	a_death(k, come_and_take, 3);
}

static void somebody_died_with_the_deliver_lock(killing *k)
{
	a_death(k, come_and_take, 2);
}

static void come_and_spill_halfway(killing *k)
{
	come_to_supervise(k);
	advance_four(k);
	spill_start(k, k->mine, SHMQ_SPILL_READY, 6);
}

static void the_supervisor_died(killing *k)
{
	twelve_more(k);
	a_death(k, come_and_spill_halfway, 3);
}

static void reap_it(killing *k)
{
	uint32_t found, returned;
	shmq_dead dead[4];

	EQUAL(shmq_reap_scan(k->mine, dead, 4, &found), 0);
	EQUAL(found, 1);
	EQUAL(MAPPED(k->w, k->mine,
	             shmq_reap(k->mine, dead[0].client, dead[0].generation, soon(), &returned)),
	      0);
}

static void a_large_one_came_and_went(killing *k)
{
	publish(k, k->b, k->p, 1, LARGE, 0);
	live_consumer(k, 16);
	finish(k, 0, k->c, k->m, k->got);
}

static void give_back(killing *k)
{
	uint64_t bytes;

	EQUAL(shmq_give_back(k->mine, k->queue[0], soon(), &bytes), 0);
	CHECK(bytes >= LARGE);
}

static void rebuild(killing *k)
{
	EQUAL(shmq_rebuild(k->mine, k->queue[0], soon()), 0);
}

static void adopt(killing *k)
{
	adopt_all(k, k->mine);
}

static void attach(killing *k)
{
	k->mine = world_attach(k->w, SHMQ_AS_CLIENT);
}

static void create_directory(killing *k)
{
	EQUAL(shmq_directory_create(k->other, &k->w->limits), 0);
}

static void create_directory_again(killing *k)
{
	shmq_broker *b;
	int r = shmq_broker_open(k->other, &b);

	if (r) {
		EQUAL(r, SHMQ_LAYOUT);
		EQUAL(ftruncate(k->other, 0), 0);
		create_directory(k);
		EQUAL(shmq_broker_open(k->other, &b), 0);
	}
	shmq_broker_close(b);
}

static const operation operations[] = {
	{"publish to a channel", 1, NULL, come, publish_one, NULL, 0, 0},
	{"publish to three channels", 3, NULL, come, publish_one, NULL, 0, 0},
	{"publish a batch to three channels", 3, NULL, come, publish_three, NULL, 0, 0},
	{"publish a large body", 3, NULL, come, publish_large, NULL, 0, 0},
	{"publish two large bodies", 2, NULL, come, publish_two_large, NULL, 0, 0},
	{"publish deferred", 3, NULL, come, publish_deferred, NULL, 0, 0},
	{"publish into a backlog", 0, NULL, come, publish_three, NULL, 0, 0},
	{"publish while the slots grow", 2, fill_first_slots, come, publish_five, NULL, 0, 0},
	{"publish to a waiter", 1, wait_on_first, come, publish_one, waiter_was_rung, 0, 0},
	{"lend and commit", 3, NULL, come, lend_and_commit, NULL, 0, 0},
	{"lend and cancel", 3, NULL, come, lend_and_cancel, NULL, 0, 0},
	{"commit a loan to a new channel", 2, NULL, lend_then_a_channel_comes, loan_commit_one, NULL, 0,
	 0},
	{"take one", 1, NULL, come_to_take, take_one, NULL, 0, 0},
	{"take many", 1, NULL, come_to_take, take_four, NULL, 0, 0},
	{"take what came back", 1, some_were_requeued, come_to_take, take_four, NULL, 0, 1},
	{"take with deferred ones", 1, some_are_deferred, come_to_take, take_four, NULL, 0, 0},
	{"take after much came and went", 1, much_came_and_went, come_to_take, take_twelve, NULL, 0, 0},
	{"finish one", 1, NULL, come_and_take, finish_one_message, NULL, 0, 0},
	{"finish many", 1, NULL, come_and_take, finish_three, NULL, 0, 0},
	{"finish pinned ones", 1, NULL, come_take_and_pin, finish_three, NULL, 0, 0},
	{"requeue", 1, twelve_more, come_and_take, requeue_three, NULL, 0, 1},
	{"requeue with a delay", 1, twelve_more, come_and_take, requeue_three_later, NULL, 0, 1},
	{"touch", 1, NULL, come_and_take, touch_three, NULL, 0, 0},
	{"expire in flight", 1, take_alive, come_to_supervise, expire_in_flight, NULL, 1, 1},
	{"expire due", 1, some_are_deferred, come_to_supervise, expire_due, NULL, 1, 1},
	{"advance", 1, twelve_more, come_to_supervise, advance_four, NULL, 1, 0},
	{"spill", 1, twelve_more, come_to_supervise, spill_six, NULL, 1, 0},
	{"spill in vain", 1, twelve_more, come_to_supervise, spill_in_vain, NULL, 1, 0},
	{"spill what came back", 1, some_were_requeued, come_to_supervise, spill_what_came_back, NULL, 1,
	 1},
	{"flush", 1, a_bit_of_everything, come_to_supervise, flush, NULL, 1, 1},
	{"restore", 1, twelve_more, come_and_spill, restore_six, NULL, 1, 0},
	{"unrestore", 1, twelve_more, come_spill_and_restore, unrestore_six, NULL, 1, 0},
	{"write ahead", 1, twelve_more, come_and_read_some, write_ahead, NULL, 1, 1},
	{"write ahead in vain", 1, twelve_more, come_and_read_some, write_ahead_in_vain, NULL, 1, 1},
	{"write a chunk", 1, more_are_deferred, come_to_supervise, write_chunk, NULL, 1, 1},
	{"write a chunk in vain", 1, more_are_deferred, come_to_supervise, write_chunk_in_vain, NULL, 1,
	 1},
	{"read a chunk", 1, more_are_deferred, come_and_write_chunk, read_chunk, NULL, 1, 1},
	{"empty with a chunk", 1, everything_and_a_chunk, come, empty_it, NULL, 0, 1},
	{"empty during a chunk", 1, half_a_chunk, come, empty_it, the_chunk_ends, 0, 1},
	{"pump", 0, a_backlog_to_move, come_to_supervise, pump, pump_the_rest, 1, 1},
	{"pause", 1, wait_on_first, come, pause_and_go_on, let_go_on, 0, 0},
	{"empty", 1, a_bit_of_everything, come, empty_it, NULL, 0, 1},
	{"empty during a spill", 1, everything_and_a_spill, come, empty_it, the_spill_ends, 0, 1},
	{"create a topic", 1, NULL, come_to_supervise, create_topic, create_topic_again, 1, 0},
	{"create a channel", 2, NULL, come_to_supervise, create_channel, create_channel_again, 1, 0},
	{"take over", 0, NULL, come_to_supervise, take_over, take_over_again, 1, 0},
	{"remove a channel", 2, NULL, come_to_supervise, remove_channel, remove_channel_again, 1, 0},
	{"remove a topic", 1, NULL, come_to_supervise, remove_topic, remove_topic_again, 1, 0},
	{"attach", 1, NULL, NULL, attach, NULL, 0, 0},
	{"detach", 2, NULL, come_and_hold_everything, leave, no_request_is_left, 0, 0},
	{"open a consumer", 1, NULL, come, come_to_take, NULL, 0, 0},
	{"close a consumer", 1, wait_on_first, come_and_take, close_consumer, NULL, 0, 0},
	{"wait", 1, nothing_is_there, come_to_take, wait_a_moment, NULL, 0, 0},
	{"wait for many", 1, nothing_is_there, come_to_take, wait_with_a_waiter, NULL, 0, 0},
	{"pin", 1, NULL, come_and_take, pin_one, NULL, 0, 0},
	{"unpin", 1, NULL, come_take_pin_and_finish, unpin_one, NULL, 0, 0},
	{"request", 1, NULL, come, post_request, no_request_is_left, 0, 0},
	{"reap", 2, somebody_died, come_to_supervise, reap_it, no_request_is_left, 1, 0},
	{"publish after a death", 2, somebody_died_with_both_locks, come, publish_three, NULL, 0, 0},
	{"take after a death", 2, somebody_died_with_the_deliver_lock, come, come_now_and_take_one, NULL, 0,
	 0},
	{"give memory back", 1, a_large_one_came_and_went, come_to_supervise, give_back, NULL, 1, 0},
	{"rebuild", 1, a_bit_of_everything, come_to_supervise, rebuild, NULL, 1, 1},
	{"adopt", 1, the_supervisor_died, come_to_supervise, adopt, NULL, 1, 0},
	{"open a lessee", 1, lease_of_one_alive, come, open_a_lessee_again, leases_are_whole, 0, 0},
	{"lease", 1, NULL, come_to_lease, lease_three, leases_are_whole, 0, 0},
	{"lease what came back", 1, some_were_requeued, come_to_lease, lease_three, leases_are_whole, 0,
	 1},
	{"finish leases", 1, NULL, come_and_lease, finish_the_leases, leases_are_whole, 0, 0},
	{"return leases", 1, NULL, come_and_lease, return_the_leases, leases_are_whole, 0, 0},
	{"expire leases", 1, lease_of_one_alive, come_to_supervise, expire_leases, leases_are_whole, 1, 0},
	{"lease what is on disk", 1, twelve_more, come_spill_and_lease, lease_ten, leases_are_whole, 1, 0},
	{"finish what is on disk", 1, twelve_more, come_spill_and_lease_ten, finish_the_ten,
	 leases_are_whole, 1, 0},
	{"return what is on disk", 1, twelve_more, come_spill_and_lease_ten, return_the_ten,
	 leases_are_whole, 1, 0},
	{"flush leases", 1, lease_of_one_alive, come_to_supervise, flush, leases_are_whole, 1, 0},
	{"reap a lessee", 1, somebody_died_leasing, come_to_supervise, reap_it, leases_are_whole, 1, 0},
	{"publish with a mark", 3, NULL, come, publish_marked, publish_marked_again, 0, 0},
	{"publish with a mark after a death", 2, somebody_died_marking, come, publish_after_the_mark,
	 publish_marked_again, 0, 0},
	{"create a directory", 1, NULL, NULL, create_directory, create_directory_again, 0, 0},
};

/* ---- the points ---- */

static void add_points(const char *text)
{
	static const char *const of_repair[] = {"rebuild.", "recover.", "reap.", "return.",
	                                        "release.", "back.",    "lease.orphaned"};

	for (const char *at = text; (at = strstr(at, "SHMQ_KILLPOINT(\"")); at++) {
		const char *name = at + strlen("SHMQ_KILLPOINT(\""), *quote = strchr(name, '"');
		char *to = points[point_count];

		CHECK(quote && quote - name < 64 && point_count < 256);
		memcpy(to, name, (size_t)(quote - name));
		for (uint32_t i = 0; i < point_count; i++)
			if (!strcmp(points[i], to)) {
				memset(to, 0, 64);
				break;
			}
		if (!*to)
			continue;
		for (size_t i = 0; i < sizeof(of_repair) / sizeof(of_repair[0]); i++)
			if (!strncmp(to, of_repair[i], strlen(of_repair[i])))
				repair_points[repair_count++] = point_count;
		point_count++;
	}
}

static void read_points(const char *directory)
{
	DIR *d = opendir(directory);
	struct dirent *entry;

	if (!d) {
		fprintf(stderr, "no sources in %s: give native/core as first argument\n", directory);
		exit(1);
	}
	while ((entry = readdir(d))) {
		size_t length = strlen(entry->d_name), got;
		char path[4096], *text;
		FILE *f;

		if (length < 2 || strcmp(entry->d_name + length - 2, ".c"))
			continue;
		snprintf(path, sizeof(path), "%s/%s", directory, entry->d_name);
		f = fopen(path, "r");
		CHECK(f);
		text = calloc(1, 1 << 20);
		got = fread(text, 1, (1 << 20) - 1, f);
		CHECK(got);
		fclose(f);
		add_points(text);
		free(text);
	}
	closedir(d);
}

#ifndef SHMQ_SOURCE_DIR
#define SHMQ_SOURCE_DIR NULL
#endif

/* native/core, seen from this file's own path or from where ctest runs. */
static const char *source_directory(void)
{
	static char path[4096];
	char *cut;

	if (SHMQ_SOURCE_DIR)
		return SHMQ_SOURCE_DIR;
	strcpy(path, __FILE__);
	cut = strrchr(path, '/');
	strcpy(cut ? cut : path, cut ? "/../../native/core" : "../../native/core");
	return path;
}

int main(int argc, char **argv)
{
	page *shared = mmap(NULL, sizeof(page), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	const char *only = argc > 2 ? argv[2] : NULL;
	uint32_t missed = 0;

	CHECK(shared != MAP_FAILED);
	read_points(argc > 1 ? argv[1] : source_directory());
	CHECK(point_count && repair_count);
	for (size_t i = 0; i < sizeof(operations) / sizeof(operations[0]); i++) {
		const operation *o = &operations[i];
		uint32_t passed = 0, before = deaths;

		if (only && strcmp(only, o->name))
			continue;
		run(o, NULL, 0, shared);
		for (uint32_t p = 0; p < point_count; p++) {
			uint32_t count = 0;

			while (run(o, points[p], count + 1, shared)) {
				count++;
				deaths++;
			}
			passed += count != 0;
			point_hits[p] += count;
		}
		printf("%-34s %3u points, %4u deaths, 0 violations\n", o->name, passed, deaths - before);
		fflush(stdout);
	}
	for (uint32_t p = 0; !only && p < point_count; p++)
		if (!point_hits[p]) {
			fprintf(stderr, "no operation passes %s\n", points[p]);
			missed++;
		}
	printf("%u points, %u runs, %u deaths of those who acted, %u of those who repaired\n",
	       point_count, runs, deaths, repairer_deaths);
	return missed != 0;
}
#endif
