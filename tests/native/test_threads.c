/*
 * All operations at once, by several threads on the same queues: for ThreadSanitizer, which sees
 * threads and not processes. Bounded by operations, not by time.
 *
 * Bodies are copied as a client does it that takes no pin: copy, then shmq_message_is_ours. A
 * timeout may hand the message to another meanwhile and its bytes to a publisher: the copy is
 * thrown away then. That is a race of plain bytes on purpose (a seqlock), so here a consumer pins
 * first, as the binding does for long ones; bytes seen through a pin must be clean.
 */
#include "harness.h"

#include <pthread.h>

/* ThreadSanitizer tells apart what it sees at two addresses: there all share one mapping. Without
 * it the first of each kind has a handle, and with it a mapping and a client entry, of its own. */
#ifdef __SANITIZE_THREAD__
#define ROUNDS 4000u
#define OWN_HANDLE(me) false
#else
#define ROUNDS 50000u
#define OWN_HANDLE(me) ((me)->index == 0)
#endif
#define PRODUCERS 2u
#define CONSUMERS 2u

typedef struct stage {
	world *w;
	uint32_t topic, generation, queue[2];
	uint64_t serial[2];
	shmq_broker *shared;
	shmq_producer *shared_producer;
	_Atomic uint32_t published, publishing, finished[2], stop;
	_Atomic uint8_t *seen[2]; /* by message number: finished how often */
} stage;

static uint32_t chance(uint32_t *seed, uint32_t below)
{
	*seed = *seed * 1664525u + 1013904223u;
	return (uint32_t)((uint64_t)*seed * below >> 32);
}

static void map_all(stage *x, shmq_broker *b)
{
	for (int k = 0; k < 2; k++)
		EQUAL(shmq_broker_map(b, x->queue[k], x->serial[k], x->w->queues[x->serial[k]]), 0);
}

typedef struct worker {
	stage *x;
	uint32_t index;
	pthread_t thread;
} worker;

static uint32_t fill(uint8_t *body, uint32_t number, uint32_t *seed)
{
	uint32_t length = chance(seed, 40) ? 4 + chance(seed, 300) : 70000;

	memcpy(body, &number, 4);
	memset(body + 4, (int)(number & 0xff), length - 4);
	return length;
}

static void *produce(void *argument)
{
	worker *me = argument;
	stage *x = me->x;
	shmq_broker *b = OWN_HANDLE(me) ? world_attach(x->w, SHMQ_AS_CLIENT) : x->shared;
	shmq_producer *p = x->shared_producer;
	uint32_t seed = me->index + 1, number = me->index;
	uint8_t *body = malloc(3 * 70000);

	if (OWN_HANDLE(me)) {
		map_all(x, b);
		EQUAL(shmq_producer_open(b, x->topic, x->generation, &p), 0);
	}
	for (uint32_t i = 0; i < ROUNDS;) {
		uint32_t n = 1 + chance(&seed, 3);
		int64_t due = chance(&seed, 10) ? 0 : shmq_realtime() + 1;
		shmq_body bodies[3];
		shmq_loan *loan;
		uint64_t id;
		int r;

		if (n > ROUNDS - i)
			n = ROUNDS - i;
		for (uint32_t k = 0; k < n; k++)
			bodies[k] = (shmq_body){body + k * 70000,
			                        fill(body + k * 70000, number + k * PRODUCERS, &seed)};
		if (n == 1 && !chance(&seed, 4)) {
			r = shmq_loan_begin(p, bodies[0].length, soon(), &loan);
			if (!r) {
				memcpy(shmq_loan_data(loan), body, bodies[0].length);
				r = chance(&seed, 4) ? shmq_loan_commit(loan, due, soon(), &id) : SHMQ_AGAIN;
				if (r)
					EQUAL(shmq_loan_cancel(loan, soon()), 0);
				shmq_loan_free(loan);
			}
		} else {
			r = shmq_publish(p, bodies, n, due, soon(), &id);
		}
		if (r == SHMQ_FULL) {
			r = shmq_producer_wait(p, soon());
			CHECK(r == 0 || r == SHMQ_TIMEOUT);
			continue;
		}
		if (r == SHMQ_AGAIN)
			continue;
		EQUAL(r, 0);
		i += n;
		number += n * PRODUCERS;
	}
	free(body);
	atomic_fetch_sub(&x->publishing, 1);
	if (OWN_HANDLE(me)) {
		shmq_producer_close(p);
		EQUAL(shmq_broker_detach(b, soon()), 0);
		shmq_broker_close(b);
	}
	return NULL;
}

static void look_at(stage *x, uint32_t k, const shmq_message *m, bool finished)
{
	const uint8_t *body = m->body;
	uint32_t number;

	memcpy(&number, body, 4);
	CHECK(number < PRODUCERS * ROUNDS);
	for (uint32_t i = 4; i < m->length; i += 1 + m->length / 50)
		EQUAL(body[i], number & 0xff);
	if (finished)
		EQUAL(atomic_fetch_add(&x->seen[k][number], 1), 0);
}

static bool all_done(stage *x)
{
	return ld(&x->finished[0]) == PRODUCERS * ROUNDS && ld(&x->finished[1]) == PRODUCERS * ROUNDS;
}

static void *consume(void *argument)
{
	worker *me = argument;
	stage *x = me->x;
	shmq_broker *b = OWN_HANDLE(me) ? world_attach(x->w, SHMQ_AS_CLIENT) : x->shared;
	uint32_t seed = 100 + me->index, got;
	shmq_consumer *c[2];
	shmq_message m[20];
	uint8_t ok[20];

	if (OWN_HANDLE(me))
		map_all(x, b);
	for (uint32_t k = 0; k < 2; k++)
		EQUAL(shmq_consumer_open(b, x->queue[k], x->serial[k], 60, 0, soon(), &c[k]), 0);
	for (uint32_t turn = 0; !all_done(x); turn++) {
		uint32_t k = turn % 2;
		bool pinned[20];
		int r = shmq_take(c[k], m, 1 + chance(&seed, 20), soon(), &got);

		if (r == SHMQ_EMPTY) {
			r = shmq_consumer_wait(c[k], shmq_now() + NS_PER_MS);
			CHECK(r == 0 || r == SHMQ_TIMEOUT);
			continue;
		}
		EQUAL(r, 0);
		for (uint32_t i = 0; i < got; i++)
			pinned[i] = !shmq_pin(c[k], &m[i], soon());
		if (!chance(&seed, 6)) {
			(void)shmq_touch(c[k], m, got, ok, soon());
			r = shmq_requeue(c[k], m, got, chance(&seed, 2) ? 0 : NS_PER_MS, ok, soon());
			CHECK(r == 0 || r == SHMQ_NOT_IN_FLIGHT);
			for (uint32_t i = 0; i < got; i++)
				if (pinned[i])
					look_at(x, k, &m[i], false);
		} else {
			r = shmq_finish(c[k], m, got, ok, soon());
			CHECK(r == 0 || r == SHMQ_NOT_IN_FLIGHT);
			for (uint32_t i = 0; i < got; i++) {
				CHECK(pinned[i] || !ok[i]); /* a message that could not be pinned had timed out */
				if (pinned[i])
					look_at(x, k, &m[i], ok[i]);
				atomic_fetch_add(&x->finished[k], ok[i]);
			}
		}
		for (uint32_t i = 0; i < got; i++)
			if (pinned[i])
				EQUAL(shmq_unpin(c[k], &m[i], soon()), 0);
		if (turn % 500 == 499) { /* gives back what it holds and comes again */
			EQUAL(shmq_consumer_close(c[k], soon()), 0);
			shmq_consumer_free(c[k]);
			EQUAL(shmq_consumer_open(b, x->queue[k], x->serial[k], 60, 0, soon(), &c[k]), 0);
		}
	}
	for (uint32_t k = 0; k < 2; k++) {
		EQUAL(shmq_consumer_close(c[k], soon()), 0);
		shmq_consumer_free(c[k]);
	}
	if (OWN_HANDLE(me)) {
		EQUAL(shmq_broker_detach(b, soon()), 0);
		shmq_broker_close(b);
	}
	return NULL;
}

/* Scans: in-flight timeouts strike now and then, and due messages become REQUEUED. */
static void *scan(void *argument)
{
	stage *x = ((worker *)argument)->x;
	uint32_t seed = 7, expired, due;

	while (!ld(&x->stop)) {
		int64_t now = chance(&seed, 20) ? 0 : shmq_now() + 61 * NS_PER_S;

		for (int k = 0; k < 2; k++)
			EQUAL(shmq_expire(x->w->supervisor, x->queue[k],
			                  &(shmq_expiry){.now = now, .realtime = shmq_realtime(), .limit = 50},
			                  soon(), &expired, &due),
			      0);
		if (!chance(&seed, 50))
			EQUAL(shmq_rebuild(x->w->supervisor, x->queue[seed >> 9 & 1], soon()), 0);
		if (!chance(&seed, 50)) {
			EQUAL(shmq_channel_pause(x->w->supervisor, x->queue[0], x->serial[0], true, soon()), 0);
			EQUAL(shmq_channel_pause(x->w->supervisor, x->queue[0], x->serial[0], false, soon()),
			      0);
		}
		sched_yield();
	}
	return NULL;
}

/* The spiller of both queues: to "disk" and back. */
static void *overflow(void *argument)
{
	stage *x = ((worker *)argument)->x;
	shmq_broker *b = x->w->supervisor;
	uint32_t slots[64], lengths[64], moved = 0, taken;
	uint64_t positions[64], at[2] = {0, 0}, used;
	shmq_spill s = {.slots = slots, .lengths = lengths, .positions = positions};
	uint64_t size = UINT64_C(64) << 20;
	uint8_t *disk[2];

	for (int k = 0; k < 2; k++)
		disk[k] = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	while (!ld(&x->stop)) {
		for (uint32_t k = 0; k < 2; k++) {
			shmq_queue_desc *q = ld(&b->maps[x->queue[k]])->q;
			uint64_t from = ld(&q->disk_read), to;

			if (from == at[k]) /* all read: go on at the file's end only while there is room */
				EQUAL(shmq_stage_oldest(b, x->queue[k], 5, soon(), &moved), 0);
			if (at[k] < size / 2 &&
			    !shmq_spill_begin(b, x->queue[k], SHMQ_SPILL_READY, 20, 1 << 20, soon(), &s)) {
				bool fails = moved % 5 == 4;

				EQUAL(shmq_spill_encode(b, &s, disk[k] + at[k]), 0);
				to = at[k];
				for (uint32_t i = 0; i < s.count; to += lengths[i++])
					positions[i] = to;
				EQUAL(shmq_spill_end(b, &s, to, !fails, soon()), 0);
				at[k] = fails ? at[k] : to;
			}
			from = ld(&q->disk_read);
			if (from != at[k])
				EQUAL(shmq_restore(b, x->queue[k],
				                   &(shmq_records){.data = disk[k] + from,
				                                   .length = at[k] - from,
				                                   .position = from,
				                                   .next_position = at[k]},
				                   soon(), &taken, &used),
				      0);
		}
		sched_yield();
	}
	for (int k = 0; k < 2; k++)
		munmap(disk[k], size);
	return NULL;
}

int main(void)
{
	shmq_limits limits = small_limits(400, 300);
	stage x = {.publishing = PRODUCERS};
	worker producers[PRODUCERS], consumers[CONSUMERS], scanner = {.x = &x}, spiller = {.x = &x};

	limits.arena_size = 16 << 20;
	x.w = world_start(limits);
	x.topic = world_topic(x.w, "t", &x.generation);
	for (int k = 0; k < 2; k++) {
		x.queue[k] = world_queue(x.w, x.topic, k ? "b" : "a", &x.serial[k]);
		x.seen[k] = calloc(PRODUCERS * ROUNDS, 1);
	}
#ifdef __SANITIZE_THREAD__
	x.shared = x.w->supervisor;
#else
	x.shared = world_attach(x.w, SHMQ_AS_CLIENT);
#endif
	map_all(&x, x.shared);
	(void)world_view(x.w, x.queue[0]);
	(void)world_view(x.w, x.queue[1]);
	EQUAL(shmq_producer_open(x.shared, x.topic, x.generation, &x.shared_producer), 0);
	for (uint32_t i = 0; i < PRODUCERS; i++) {
		producers[i] = (worker){.x = &x, .index = i};
		EQUAL(pthread_create(&producers[i].thread, NULL, produce, &producers[i]), 0);
	}
	for (uint32_t i = 0; i < CONSUMERS; i++) {
		consumers[i] = (worker){.x = &x, .index = i};
		EQUAL(pthread_create(&consumers[i].thread, NULL, consume, &consumers[i]), 0);
	}
	EQUAL(pthread_create(&scanner.thread, NULL, scan, &scanner), 0);
	EQUAL(pthread_create(&spiller.thread, NULL, overflow, &spiller), 0);
	for (uint32_t i = 0; i < PRODUCERS; i++)
		EQUAL(pthread_join(producers[i].thread, NULL), 0);
	for (uint32_t i = 0; i < CONSUMERS; i++)
		EQUAL(pthread_join(consumers[i].thread, NULL), 0);
	st(&x.stop, 1);
	EQUAL(pthread_join(scanner.thread, NULL), 0);
	EQUAL(pthread_join(spiller.thread, NULL), 0);
	for (int k = 0; k < 2; k++) {
		shmq_queue_desc *q = world_view(x.w, x.queue[k])->q;

		for (uint32_t i = 0; i < PRODUCERS * ROUNDS; i++)
			EQUAL(ld(&x.seen[k][i]), 1);
		EQUAL(ring_count(&q->free_head, &q->free_tail), ld(&q->slots_committed));
		free((void *)(uintptr_t)x.seen[k]);
	}
	SOUND(x.w);
	shmq_producer_close(x.shared_producer);
	if (x.shared != x.w->supervisor) {
		EQUAL(shmq_broker_detach(x.shared, soon()), 0);
		shmq_broker_close(x.shared);
	}
	world_stop(x.w);
	return 0;
}
