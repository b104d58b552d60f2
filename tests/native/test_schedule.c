/*
 * What actors do at the same time on one small queue, in every order and with every death within
 * bounds (schedule.c), held to the promises:
 *
 *   - a publish that returned is on every channel, one that died on all or on none, a batch whole;
 *   - what a finish took never comes back; nothing comes twice, from nowhere, or torn;
 *   - messages of one publisher keep their order where nothing was put back;
 *   - nobody sleeps while there is something to take; no lock is waited for for ever;
 *   - in the end everything is sound to an independent recount (checker.h), and all slots free.
 *
 * Usage: test_schedule [--whole] [--plants] [scenario ...]: small bounds, or those of a whole run;
 * --plants: built-in faults, each of which has to be found.
 */
#include "schedule.h"

#define CHECK(condition) ((condition) ? (void)0 : schedule_fail("%s: not %s", __func__, #condition))
#define EQUAL(x, y)                                                                                \
	do {                                                                                           \
		long long x_ = (long long)(x), y_ = (long long)(y);                                        \
		if (x_ != y_)                                                                              \
			schedule_fail("%s: %s is %lld, not %lld", __func__, #x, x_, y_);                       \
	} while (0)
#include "harness.h"

#include <stdio.h>

#define MESSAGES 64u
#define EACH 12u /* numbers a publisher has */
#define QUEUES 3u
#define BODY 24u
#define EARLY ACTORS /* who published before */

enum published { NOT, BEGUN, RETURNED, REFUSED };
enum finished { OPEN, BEGUN_TO, TAKEN };

typedef struct actor {
	shmq_broker *b;
	shmq_producer *p;
	shmq_consumer *c;
	shmq_message m[16];
	uint32_t number[16]; /* of the message; MESSAGES: it was gone before it was read */
	uint32_t got, next;
} actor;

/* In the heap that every run finds as it was. */
typedef struct stage {
	world *w;
	uint32_t topic, generation;
	uint32_t n, queue[QUEUES], targets;
	uint64_t serial[QUEUES];
	shmq_map *seen[QUEUES];
	actor actors[ACTORS + 1];
	uint8_t published[MESSAGES], group[MESSAGES], finished[QUEUES][MESSAGES];
	bool dropped[QUEUES]; /* its messages may be gone: emptied, or removed */
	bool late[QUEUES];    /* it came later: may lack what was published before */
	bool out_of_order, adopt, pumps, leases;
	shmq_lessee lessee;
	shmq_lease lease;
	uint32_t leased[16]; /* numbers of the messages in it */
	shmq_spill spill;
	uint32_t slots[64], lengths[64];
	uint64_t positions[64], written, chunk_bytes;
	int64_t chunk_dues[16];
	uint32_t chunk_lengths[16], chunk_count;
	uint8_t disk[16384], chunk[2048];
} stage;

static stage *k;

/* ---- what actors do ---- */

/* As everybody sees it; looking is no access that counts. */
static shmq_queue_desc *desc(uint32_t queue)
{
	return k->seen[queue]->q;
}

static void body_make(uint8_t *body, uint32_t number)
{
	snprintf((char *)body, BODY, "%05u", number);
	for (uint32_t i = 5; i < BODY; i++)
		body[i] = (uint8_t)(number * 7 + i);
}

static uint32_t body_number(const shmq_message *m)
{
	uint8_t right[BODY];
	uint32_t number = (uint32_t)strtoul(m->body, NULL, 10);

	body_make(right, number);
	if (m->length != BODY || memcmp(m->body, right, BODY))
		schedule_fail("a body is torn");
	if (number >= MESSAGES || !k->published[number])
		schedule_fail("message %u comes from nowhere", number);
	return number;
}

static void publish(uint32_t who, uint32_t n, int64_t due)
{
	actor *a = &k->actors[who];
	uint32_t first = who * EACH + a->next;
	uint8_t data[EACH][BODY];
	shmq_body bodies[EACH];
	uint64_t id;
	int r;

	a->next += n;
	for (uint32_t i = 0; i < n; i++) {
		body_make(data[i], first + i);
		bodies[i] = (shmq_body){data[i], BODY};
		k->published[first + i] = BEGUN;
		k->group[first + i] = (uint8_t)first;
	}
	r = MAPPED(k->w, a->b, shmq_publish(a->p, bodies, n, due, soon(), &id));
	if (r && r != SHMQ_GONE && r != SHMQ_NEED_BACKLOG)
		schedule_fail("publish says %s", shmq_status_name(r));
	for (uint32_t i = 0; i < n; i++)
		k->published[first + i] = r ? REFUSED : RETURNED;
}

static int64_t in_an_hour(void)
{
	return shmq_realtime() + 3600 * NS_PER_S;
}

static int take(uint32_t who, uint32_t queue, uint32_t n)
{
	actor *a = &k->actors[who];
	int r = shmq_take(a->c, a->m, n, soon(), &a->got);

	if (r) {
		a->got = 0;
		if (r != SHMQ_EMPTY && r != SHMQ_GONE)
			schedule_fail("take says %s", shmq_status_name(r));
		return r;
	}
	for (uint32_t i = 0; i < a->got; i++) {
		uint8_t copy[BODY];
		shmq_message m = a->m[i];
		uint32_t number;

		memcpy(copy, m.body, BODY);
		m.body = copy;
		a->number[i] = MESSAGES;
		if (!shmq_message_held(a->c, &a->m[i]))
			continue; /* emptied */
		number = a->number[i] = body_number(&m);
		if (k->finished[queue][number] == TAKEN)
			schedule_fail("message %u is delivered after its finish", number);
	}
	return 0;
}

static void finish(uint32_t who, uint32_t queue, uint32_t n)
{
	actor *a = &k->actors[who];
	const uint32_t *numbers = a->number;
	uint8_t ok[16];

	if (n > a->got)
		n = a->got;
	for (uint32_t i = 0; i < n; i++)
		if (numbers[i] < MESSAGES && k->finished[queue][numbers[i]] == OPEN)
			k->finished[queue][numbers[i]] = BEGUN_TO;
	(void)shmq_finish(a->c, a->m, n, ok, soon());
	for (uint32_t i = 0; i < n; i++)
		if (ok[i] && numbers[i] < MESSAGES)
			k->finished[queue][numbers[i]] = TAKEN;
		else if (numbers[i] < MESSAGES && k->finished[queue][numbers[i]] == BEGUN_TO)
			k->finished[queue][numbers[i]] = OPEN;
}

/* Reads the lease whole; false: it was ended meanwhile. */
static bool lease_read(uint32_t who, uint32_t *numbers)
{
	shmq_lease_cursor cursor;
	shmq_broker *b = k->actors[who].b;
	uint64_t ids[8], size;
	int64_t timestamps[8];
	int32_t attempts[8], offsets[9];
	uint8_t data[8 * BODY];
	uint32_t n;
	int r = shmq_lease_open(b, k->queue[0], k->serial[0], k->lease.id, 0, &cursor);

	if (!r)
		r = shmq_lease_measure(b, &cursor, 8, sizeof(data), &n, &size);
	if (!r)
		r = shmq_lease_copy(b, &cursor, n, size, ids, timestamps, attempts, offsets, data);
	if (r == SHMQ_LEASE_LOST)
		return false;
	EQUAL(r, 0);
	EQUAL(n, k->lease.count);
	for (uint32_t i = 0; i < n; i++) {
		shmq_message m = {.body = data + offsets[i],
		                  .length = (uint32_t)(offsets[i + 1] - offsets[i])};

		EQUAL(attempts[i], 1);
		numbers[i] = body_number(&m);
	}
	return true;
}

static void lease(uint32_t who, uint32_t n)
{
	int r = shmq_lease_take(k->actors[who].b, &k->lessee, 0, n, 1 << 10, 1, NULL, soon(), &k->lease);

	if (r) {
		CHECK(r == SHMQ_EMPTY || r == SHMQ_GONE);
		k->lease.count = 0;
	} else if (!lease_read(who, k->leased)) {
		k->lease.count = 0; /* emptied, flushed, ... */
	}
	for (uint32_t i = 0; i < k->lease.count; i++)
		if (k->finished[0][k->leased[i]] == TAKEN)
			schedule_fail("message %u is leased after its finish", k->leased[i]);
}

/* What lies on disk, where it lies. */
static void lease_run(uint32_t who)
{
	uint64_t from = desc(0)->disk_read, to = desc(0)->disk_write;
	shmq_run run = {from, to, 0, 0, 1, &from};
	int r;

	if (from == to)
		return;
	for (uint64_t at = from; at < to; at += RECORD_HEAD + BODY, run.count++) {
		shmq_message m = {.body = k->disk + at + RECORD_HEAD, .length = BODY};

		k->leased[run.count] = body_number(&m);
	}
	run.bytes = run.count * BODY;
	r = shmq_lease_take(k->actors[who].b, &k->lessee, 0, 8, 1 << 10, 1, &run, soon(), &k->lease);
	CHECK(!r || r == SHMQ_EMPTY || r == SHMQ_GONE);
	if (!r && k->lease.count != run.count) { /* there was something before it */
		uint64_t messages;

		r = shmq_lease_return(k->actors[who].b, &k->lessee, k->lease.id, soon(), &messages);
		CHECK(!r || r == SHMQ_LEASE_LOST);
		r = SHMQ_EMPTY;
	}
	if (r)
		k->lease.count = 0;
}

static void lease_finish(uint32_t who)
{
	uint64_t messages;
	int r;

	for (uint32_t i = 0; i < k->lease.count; i++)
		k->finished[0][k->leased[i]] = BEGUN_TO;
	r = shmq_lease_finish(k->actors[who].b, &k->lessee, k->lease.id, soon(), &messages);
	CHECK(!r || r == SHMQ_LEASE_LOST || r == SHMQ_LEASE_FENCED || r == SHMQ_GONE);
	CHECK(r || messages == k->lease.count);
	for (uint32_t i = 0; i < k->lease.count; i++)
		k->finished[0][k->leased[i]] = r ? OPEN : TAKEN;
}

/* Sleep until something comes, n messages in all. */
static void take_and_wait(uint32_t who, uint32_t n)
{
	int64_t deadline = shmq_now() + 5 * NS_PER_S;

	while (n) {
		int r = take(who, 0, 1);

		if (!r) {
			finish(who, 0, 1);
			n--;
		} else if (r == SHMQ_GONE || shmq_consumer_wait(k->actors[who].c, deadline) != 0) {
			return;
		}
	}
}

/* ---- setting up ---- */

static void come(uint32_t who, enum shmq_kind kind)
{
	actor *a = &k->actors[who];

	schedule_as(who);
	a->b = world_attach(k->w, kind);
	for (uint32_t q = 0; q < k->n; q++)
		EQUAL(shmq_broker_map(a->b, k->queue[q], k->serial[q], k->w->queues[k->serial[q]]), 0);
	schedule_as(OUTSIDE);
}

static void come_to_publish(uint32_t who)
{
	come(who, SHMQ_AS_CLIENT);
	schedule_as(who);
	EQUAL(shmq_producer_open(k->actors[who].b, k->topic, k->generation, &k->actors[who].p), 0);
	schedule_as(OUTSIDE);
}

static void come_to_take(uint32_t who, uint32_t queue)
{
	come(who, SHMQ_AS_CLIENT);
	schedule_as(who);
	k->actors[who].c = world_consumer(k->w, k->actors[who].b, k->queue[queue], k->serial[queue], 8);
	schedule_as(OUTSIDE);
}

static void come_to_supervise(uint32_t who)
{
	come(who, SHMQ_AS_SUPERVISOR);
	schedule_as(who);
	EQUAL(shmq_supervise(k->actors[who].b, &k->w->limits, soon()), 0);
	schedule_as(OUTSIDE);
	k->adopt = true;
}

static uint32_t make_queue(const char *channel)
{
	static const char *const names[] = {"a", "b", "c"};
	uint32_t q = k->n++;

	k->queue[q] = world_queue(k->w, k->topic, channel ? names[q] : NULL, &k->serial[q]);
	k->seen[q] = world_view(k->w, k->queue[q]);
	k->targets |= 1u << q;
	return q;
}

static void begin(uint32_t channels)
{
	k = schedule_alloc(sizeof(*k));
	k->w = world_start(small_limits(256, 64));
	k->topic = world_topic(k->w, "t", &k->generation);
	for (uint32_t i = 0; i < channels; i++)
		make_queue("channel");
	if (!channels)
		make_queue(NULL);
	come_to_publish(EARLY);
}

/* Every ring of queue 0 one step before its indices wrap. */
static void about_to_wrap(void)
{
	shmq_map *map = world_view(k->w, k->queue[0]);
	shmq_queue_desc *q = map->q;
	uint32_t n = ld(&q->slots_committed), start = UINT32_MAX;

	st(&q->ready_head, start);
	st(&q->ready_tail, start);
	st(&q->defer_head, start);
	st(&q->defer_tail, start);
	st(&q->requeue_head, start);
	st(&q->requeue_tail, start);
	st(&q->free_head, start);
	st(&q->free_tail, start + n);
	q->reclaimed = start + n;
	q->endowed = start;
	q->free_tail_seen = start + n;
	q->ready_head_seen = q->ready_tail_seen = start;
	for (uint32_t i = 0; i < n; i++)
		map->free[(start + i) & ld(&q->ring_mask)] = i;
}

/* ---- the end ---- */

static void settle(void)
{
	shmq_broker *s = k->w->supervisor;
	uint32_t returned;

	if (k->adopt) {
		bool supervisor_died = false;

		for (uint32_t i = 0; i < ACTORS; i++)
			supervisor_died |= k->actors[i].b && schedule_is_dead(i) && !k->actors[i].p &&
			                   !k->actors[i].c;
		if (supervisor_died) {
			EQUAL(shmq_supervise(s, &k->w->limits, soon()), 0);
			for (uint32_t q = 0; q < ld(&s->d->queues_committed); q++)
				if (ld(&s->entries[q].state) == SHMQ_ENTRY_LIVE)
					EQUAL(MAPPED(k->w, s, shmq_adopt(s, q, soon())), 0);
		}
	}
	world_reap(k->w, s, &returned);
}

static bool asleep(uint32_t who)
{
	shmq_queue_desc *q = desc(0);

	(void)who;
	return (q->ready_head == q->ready_tail || on_disk(q)) && q->requeue_head == q->requeue_tail;
}

static bool load_chunk(shmq_broker *b)
{
	uint64_t read = desc(0)->deferred_read, at = 0, bytes = 0;
	uint32_t next = read >> SHMQ_CHUNK_SHIFT == 1 ? (uint32_t)(read & 0xffffff) : 0, taken;
	int r;

	if (!desc(0)->deferred_write || desc(0)->deferred_gone || next >= k->chunk_count)
		return false;
	for (uint32_t i = 0; i < k->chunk_count; i++)
		*(i < next ? &at : &bytes) += k->chunk_lengths[i];
	r = shmq_chunk_load(b, k->queue[0], k->chunk + at, bytes, k->chunk_dues + next,
	                    k->chunk_count - next, UINT64_C(1) << SHMQ_CHUNK_SHIFT | next, soon(), &taken);
	return !r && taken;
}

static void drain(uint32_t q, uint8_t *seen)
{
	shmq_broker *s = k->w->supervisor;
	shmq_consumer *c = world_consumer(k->w, s, k->queue[q], k->serial[q], 1000);
	uint32_t last[ACTORS + 1] = {0}, got, expired, due, taken;
	uint64_t used;
	bool timed = false;
	shmq_message m[16];

	k->seen[q] = world_view(k->w, k->queue[q]);
	if (k->leases) /* their time is over */
		EQUAL(shmq_expire(s, k->queue[q], INT64_MAX - 1, 0, 1000, soon(), &expired, &due), 0);
	for (;;) {
		int r = shmq_take(c, m, 16, soon(), &got);

		if (r == SHMQ_EMPTY && desc(q)->disk_read != desc(q)->disk_write) {
			uint64_t from = desc(q)->disk_read, to = desc(q)->disk_write;

			CHECK(to <= sizeof(k->disk));
			EQUAL(shmq_restore(s, k->queue[q], k->disk + from, to - from, from, to, soon(), &taken,
			                   &used),
			      0);
			CHECK(taken);
			continue;
		}
		if (r == SHMQ_EMPTY) {
			EQUAL(shmq_expire(s, k->queue[q], 0, INT64_MAX, 1000, soon(), &expired, &due), 0);
			timed = true;
			if (due || (q == 0 && load_chunk(s)))
				continue;
			break;
		}
		EQUAL(r, 0);
		for (uint32_t i = 0; i < got; i++) {
			uint32_t number = body_number(&m[i]), who = number / EACH;

			if (seen[number]++)
				schedule_fail("queue %u: message %u comes twice", q, number);
			if (!k->out_of_order && !timed && last[who] > number)
				schedule_fail("queue %u: message %u comes behind %u", q, number, last[who]);
			last[who] = number;
		}
		EQUAL(shmq_finish(c, m, got, NULL, soon()), 0);
	}
	EQUAL(shmq_consumer_close(c, soon()), 0);
	EQUAL(ring_count(&desc(q)->free_head, &desc(q)->free_tail), desc(q)->slots_committed);
}

static void check_fates(void)
{
	uint32_t here[MESSAGES] = {0}, lacks[MESSAGES] = {0};

	for (uint32_t q = 0; q < k->n; q++) {
		uint8_t seen[MESSAGES] = {0};

		if (ld(&k->w->supervisor->entries[k->queue[q]].state) != SHMQ_ENTRY_LIVE)
			continue;
		drain(q, seen);
		for (uint32_t i = 0; i < MESSAGES; i++) {
			bool is_here = seen[i] || k->finished[q][i] != OPEN;

			if (seen[i] && k->finished[q][i] == TAKEN)
				schedule_fail("queue %u: message %u comes back after its finish", q, i);
			if (seen[i] && k->published[i] == REFUSED)
				schedule_fail("queue %u: message %u was refused, and is there", q, i);
			if (k->dropped[q] || !(k->targets >> q & 1) || k->published[i] == NOT)
				continue;
			if (!k->late[q] && k->published[i] == RETURNED && !is_here)
				schedule_fail("queue %u: message %u is lost", q, i);
			if (is_here)
				here[k->group[i]]++;
			else if (!k->late[q])
				lacks[k->group[i]]++;
		}
	}
	for (uint32_t i = 0; i < MESSAGES; i++)
		if (here[i] && lacks[i])
			schedule_fail("the publish of message %u is there %u times and lacks %u times", i,
			              here[i], lacks[i]);
}

/* Whoever comes first repairs; then nothing is locked, and nothing left to repair. */
static void check_locks(void)
{
	shmq_broker *b = k->w->supervisor;
	shmq_topic_desc *t = &b->topics[k->topic];

	EQUAL(registry_lock(b, soon()), 0);
	registry_unlock(b);
	EQUAL(MAPPED(k->w, b, topic_lock(b, t, soon())), 0);
	topic_unlock(t);
	for (uint32_t q = 0; q < k->n; q++) {
		int r;

		if (ld(&b->entries[k->queue[q]].state) != SHMQ_ENTRY_LIVE)
			continue;
		r = queue_lock(b, world_view(k->w, k->queue[q]), soon());
		EQUAL(r, 0);
		queue_unlock(world_view(k->w, k->queue[q]));
	}
}

static void sound(void)
{
	for (uint32_t q = 0; q < k->n; q++) {
		const char *wrong = "";

		if (ld(&k->w->supervisor->entries[k->queue[q]].state) == SHMQ_ENTRY_LIVE)
			wrong = checker_queue(k->w->supervisor->base, world_view(k->w, k->queue[q])->base);
		if (*wrong)
			schedule_fail("queue %u: %s", q, wrong);
	}
}

static void pump(shmq_broker *b)
{
	uint32_t moved;
	int r;

	do
		r = MAPPED(k->w, b, shmq_pump(b, k->topic, k->generation, 2, soon(), &moved));
	while (!r && moved);
}

static void verify(void)
{
	/* What a dead consumer had comes back in no order. */
	for (uint32_t i = 0; i < ACTORS; i++)
		k->out_of_order |= schedule_is_dead(i) && k->actors[i].c;
	check_locks();
	sound();
	if (ld(&k->w->supervisor->entries[k->queue[0]].state) == SHMQ_ENTRY_LIVE)
		EQUAL(shmq_channel_pause(k->w->supervisor, k->queue[0], k->serial[0], false, soon()), 0);
	if (k->pumps)
		pump(k->w->supervisor);
	for (uint32_t i = 0; i < ACTORS; i++) {
		if (!k->actors[i].b || schedule_is_dead(i))
			continue;
		schedule_as(i);
		EQUAL(MAPPED(k->w, k->actors[i].b, shmq_broker_detach(k->actors[i].b, soon())), 0);
		schedule_as(OUTSIDE);
	}
	sound();
	check_fates();
	sound();
	if (!ld(&k->w->supervisor->topics[k->topic].state))
		return;
	memset(k->finished, 0, sizeof(k->finished));
	memset(k->published, 0, sizeof(k->published));
	memset(k->dropped, 0, sizeof(k->dropped));
	memset(k->late, 0, sizeof(k->late));
	k->actors[EARLY].next = 0;
	publish(EARLY, 2, 0);
	sound();
	check_fates();
}

/* ---- scenarios: begin_... sets up, the rest is what the actors do ---- */

static void publish_one_0(void) { publish(0, 1, 0); }
static void publish_batch_0(void) { publish(0, 2, 0); }
static void publish_batch_1(void) { publish(1, 3, 0); }
static void publish_twice_0(void)
{
	publish(0, 1, 0);
	publish(0, 1, 0);
}
static void publish_deferred_0(void) { publish(0, 2, in_an_hour()); }

static void take_one_1(void)
{
	take(1, 0, 1);
	finish(1, 0, 1);
}
static void take_two_1(void)
{
	take(1, 0, 2);
	finish(1, 0, 2);
}
static void take_one_2(void)
{
	take(2, 0, 1);
	finish(2, 0, 1);
}
static void take_other_2(void)
{
	take(2, 1, 1);
	finish(2, 1, 1);
}
static void finish_1(void) { finish(1, 0, 8); }
static void requeue_1(void)
{
	(void)shmq_requeue(k->actors[1].c, k->actors[1].m, k->actors[1].got, 0, NULL, soon());
}
static void touch_1(void)
{
	(void)shmq_touch(k->actors[1].c, k->actors[1].m, k->actors[1].got, NULL, soon());
}
static void close_1(void) { EQUAL(shmq_consumer_close(k->actors[1].c, soon()), 0); }
static void wait_1(void) { take_and_wait(1, 1); }
static void wait_2(void) { take_and_wait(2, 1); }

static void begin_publish_and_take(void)
{
	begin(1);
	come_to_publish(0);
	come_to_take(1, 0);
}
static void begin_publish_and_take_wrapping(void)
{
	begin(1);
	about_to_wrap();
	publish(EARLY, 1, 0);
	come_to_publish(0);
	come_to_take(1, 0);
}
static void begin_two_publish(void)
{
	begin(2);
	come_to_publish(0);
	come_to_publish(1);
	come_to_take(2, 1);
}
static void begin_publish_and_two_take(void)
{
	begin(1);
	publish(EARLY, 1, 0);
	come_to_publish(0);
	come_to_take(1, 0);
	come_to_take(2, 0);
}
static void begin_publish_and_two_wait(void)
{
	begin(1);
	come_to_publish(0);
	come_to_take(1, 0);
	come_to_take(2, 0);
}
static void begin_in_flight(void)
{
	begin(1);
	publish(EARLY, 3, 0);
	come_to_publish(0);
	come_to_take(1, 0);
	schedule_as(1);
	take(1, 0, 2);
	schedule_as(OUTSIDE);
	k->out_of_order = true;
}

/* ---- the supervisor's side: actor 3 ---- */

static void spill_begin(enum shmq_spill_from from, uint32_t n)
{
	k->spill.slots = k->slots;
	k->spill.lengths = k->lengths;
	k->spill.positions = k->positions;
	if (shmq_spill_begin(k->actors[3].b, k->queue[0], from, n, 1 << 14, soon(), &k->spill)) {
		k->spill.count = 0;
		return;
	}
}

static void spill_end(void)
{
	uint64_t at = desc(0)->disk_write;
	int r;

	if (!k->spill.count)
		return;
	EQUAL(shmq_spill_encode(k->actors[3].b, &k->spill, k->disk + at), 0);
	for (uint32_t i = 0; i < k->spill.count; at += k->lengths[i++])
		k->positions[i] = at;
	r = shmq_spill_end(k->actors[3].b, &k->spill, at, true, soon());
	CHECK(!r || r == SHMQ_GONE);
}

static void spill_3(void)
{
	spill_begin(SHMQ_SPILL_READY, 2);
	spill_end();
}
static void spill_in_vain_3(void)
{
	spill_begin(SHMQ_SPILL_READY, 2);
	if (k->spill.count)
		EQUAL(shmq_spill_end(k->actors[3].b, &k->spill, 0, false, soon()), 0);
}
static void spill_returned_3(void)
{
	spill_begin(SHMQ_SPILL_RETURNED, 2);
	spill_end();
}
static void spill_out_3(void)
{
	spill_begin(SHMQ_SPILL_OUT, 2);
	spill_end();
}
static void flush_3(void)
{
	uint32_t count;

	EQUAL(shmq_unrestore(k->actors[3].b, k->queue[0], soon(), &count), 0);
	spill_begin(SHMQ_SPILL_ALL, 8);
	spill_end();
}
static void restore_3(void)
{
	uint64_t from = desc(0)->disk_read, to = desc(0)->disk_write, used;
	uint32_t taken;
	int r;

	do
		r = shmq_restore(k->actors[3].b, k->queue[0], k->disk + from, to - from, from, to, soon(),
		                 &taken, &used);
	while (r == SHMQ_AGAIN);
	CHECK(!r || r == SHMQ_GONE);
}
static void advance_3(void)
{
	uint32_t moved;

	EQUAL(shmq_advance(k->actors[3].b, k->queue[0], 1, soon(), &moved), 0);
}
static void advance_and_spill_3(void)
{
	advance_3();
	spill_3();
}
static void spill_and_restore_3(void)
{
	spill_3();
	restore_3();
}
static void write_before_disk(enum shmq_spill_from from, bool ok)
{
	int r;

	spill_begin(from, 8);
	if (!k->spill.count)
		return;
	EQUAL(shmq_spill_encode(k->actors[3].b, &k->spill, k->disk + k->spill.position), 0);
	r = shmq_spill_end(k->actors[3].b, &k->spill, 0, ok, soon());
	CHECK(!r || r == SHMQ_GONE);
}
static void write_ahead_3(void)
{
	write_before_disk(SHMQ_SPILL_AHEAD, true);
}
static void write_in_front_3(void)
{
	write_before_disk(SHMQ_SPILL_FRONT, true);
}
static void write_in_front_in_vain_3(void)
{
	write_before_disk(SHMQ_SPILL_FRONT, false);
}
static void expire_3(void)
{
	uint32_t expired, due;

	EQUAL(shmq_expire(k->actors[3].b, k->queue[0], shmq_now() + 1000 * NS_PER_S, INT64_MAX, 8, soon(),
	                  &expired, &due),
	      0);
}
static void write_chunk_3(void)
{
	int r;

	k->spill.slots = k->slots;
	k->spill.lengths = k->lengths;
	k->spill.positions = k->positions;
	if (shmq_chunk_begin(k->actors[3].b, k->queue[0], 1, INT64_MIN, 2, 1 << 10, soon(), &k->spill))
		return;
	EQUAL(shmq_spill_encode(k->actors[3].b, &k->spill, k->chunk), 0);
	for (uint32_t i = 0; i < k->spill.count; i++) {
		k->chunk_lengths[i] = k->lengths[i];
		k->chunk_dues[i] = (int64_t)k->positions[i];
	}
	k->chunk_count = k->spill.count;
	r = shmq_spill_end(k->actors[3].b, &k->spill, 0, true, soon());
	CHECK(!r || r == SHMQ_GONE);
}
static void chunk_there_and_back_3(void)
{
	write_chunk_3();
	(void)load_chunk(k->actors[3].b);
}
static void pump_3(void) { pump(k->actors[3].b); }
static void enter_channel_3(void)
{
	k->late[1] = true;
	EQUAL(MAPPED(k->w, k->actors[3].b,
	             shmq_queue_enter(k->actors[3].b, k->queue[1], k->serial[1], k->topic, "b", soon())),
	      0);
}
static void take_over_3(void)
{
	uint32_t queue;
	uint64_t serial;

	EQUAL(MAPPED(k->w, k->actors[3].b,
	             shmq_queue_take_over(k->actors[3].b, k->topic, "a", soon(), &queue, &serial)),
	      0);
	EQUAL(shmq_queue_renamed(k->actors[3].b, queue, "t:a", soon()), 0);
}
static void remove_channel_3(void)
{
	k->dropped[0] = true;
	EQUAL(MAPPED(k->w, k->actors[3].b,
	             shmq_queue_remove(k->actors[3].b, k->queue[0], k->serial[0], false, soon())),
	      0);
}
static void adopt_3(void)
{
	EQUAL(shmq_adopt(k->actors[3].b, k->queue[0], soon()), 0);
}
static void rebuild_2(void)
{
	EQUAL(shmq_rebuild(k->actors[2].b, k->queue[0], soon()), 0);
}
static void rebuild_3(void)
{
	EQUAL(shmq_rebuild(k->actors[3].b, k->queue[0], soon()), 0);
}
static void give_back_3(void)
{
	uint64_t bytes;

	EQUAL(shmq_give_back(k->actors[3].b, k->queue[0], soon(), &bytes), 0);
	CHECK(bytes);
}
static void reap_3(void)
{
	uint32_t returned;

	(void)world_reap(k->w, k->actors[3].b, &returned);
}
static void lease_1(void) { lease(1, 2); }
static void lease_run_1(void) { lease_run(1); }
static void lease_finish_1(void) { lease_finish(1); }
static void lease_return_1(void)
{
	uint64_t messages;
	int r = shmq_lease_return(k->actors[1].b, &k->lessee, k->lease.id, soon(), &messages);

	CHECK(!r || r == SHMQ_LEASE_LOST);
}
static void lease_read_2(void)
{
	uint32_t numbers[8];

	if (lease_read(2, numbers))
		CHECK(!memcmp(numbers, k->leased, k->lease.count * sizeof(*numbers)));
}
/* The next incarnation of the name. */
static void lessee_open_2(void)
{
	shmq_lessee next;
	shmq_lease all[4];
	uint32_t n;

	EQUAL(shmq_lessee_open(k->actors[2].b, k->queue[0], k->serial[0], "l", 10 * NS_PER_S, NS_PER_S,
	                       soon(), &next),
	      0);
	EQUAL(shmq_lease_list(k->actors[2].b, &next, all, 4, soon(), &n), 0);
	CHECK(n <= 1 && (!n || all[0].count == k->lease.count));
}
static void lease_end_2(void)
{
	uint64_t messages;
	int r = shmq_lease_end(k->actors[2].b, k->queue[0], k->serial[0], k->lease.id, true, soon(),
	                       &messages);

	CHECK(!r || r == SHMQ_LEASE_LOST);
}
static void empty_2(void)
{
	uint64_t dropped;

	k->dropped[0] = true;
	EQUAL(MAPPED(k->w, k->actors[2].b,
	             shmq_queue_empty(k->actors[2].b, k->queue[0], k->serial[0], soon(), &dropped)),
	      0);
}
static void pause_2(void)
{
	EQUAL(MAPPED(k->w, k->actors[2].b,
	             shmq_channel_pause(k->actors[2].b, k->queue[0], k->serial[0], true, soon())),
	      0);
	EQUAL(MAPPED(k->w, k->actors[2].b,
	             shmq_channel_pause(k->actors[2].b, k->queue[0], k->serial[0], false, soon())),
	      0);
}
static void pin_finish_unpin_1(void)
{
	actor *a = &k->actors[1];

	EQUAL(shmq_pin(a->c, a->m, soon()), 0);
	finish(1, 0, 1);
	if (memcmp(a->m[0].body, "000", 3))
		schedule_fail("a pinned body was overwritten");
	EQUAL(shmq_unpin(a->c, a->m, soon()), 0);
}
static void loan_and_commit_0(void)
{
	actor *a = &k->actors[0];
	uint32_t number = a->next++;
	shmq_loan *loan;
	uint64_t id;
	int r;

	EQUAL(MAPPED(k->w, a->b, shmq_loan_begin(a->p, BODY, soon(), &loan)), 0);
	body_make(shmq_loan_data(loan), number);
	k->published[number] = BEGUN;
	k->group[number] = (uint8_t)number;
	r = MAPPED(k->w, a->b, shmq_loan_commit(loan, 0, soon(), &id));
	CHECK(!r || r == SHMQ_GONE);
	k->published[number] = r ? REFUSED : RETURNED;
	if (r)
		EQUAL(shmq_loan_cancel(loan, soon()), 0);
}
static void loan_and_cancel_0(void)
{
	shmq_loan *loan;

	EQUAL(MAPPED(k->w, k->actors[0].b, shmq_loan_begin(k->actors[0].p, BODY, soon(), &loan)), 0);
	EQUAL(shmq_loan_cancel(loan, soon()), 0);
}
static void attach_0(void)
{
	EQUAL(shmq_broker_attach(k->actors[0].b, SHMQ_AS_CLIENT, soon()), 0);
}
static void attach_1(void)
{
	EQUAL(shmq_broker_attach(k->actors[1].b, SHMQ_AS_CLIENT, soon()), 0);
}
static void detach_1(void)
{
	EQUAL(MAPPED(k->w, k->actors[1].b, shmq_broker_detach(k->actors[1].b, soon())), 0);
}

static void begin_with_supervisor(void)
{
	begin(1);
	publish(EARLY, 4, 0);
	come_to_publish(0);
	come_to_take(1, 0);
	come(2, SHMQ_AS_CLIENT);
	come_to_supervise(3);
}
static void begin_spilled(void)
{
	begin_with_supervisor();
	schedule_as(3);
	spill_3();
	schedule_as(OUTSIDE);
}
static void begin_spill_half(void)
{
	begin_with_supervisor();
	schedule_as(3);
	spill_begin(SHMQ_SPILL_READY, 3);
	schedule_as(OUTSIDE);
}
static void begin_taken(void)
{
	begin_with_supervisor();
	schedule_as(1);
	take(1, 0, 2);
	schedule_as(OUTSIDE);
	k->out_of_order = true;
}
/* And there was room for far more. */
static void begin_taken_of_many(void)
{
	shmq_map *map;
	uint64_t had;

	begin_taken();
	schedule_as(3);
	EQUAL(MAPPED(k->w, k->actors[3].b,
	             map_get_serial(k->actors[3].b, k->queue[0], k->serial[0], &map)),
	      0);
	had = ld(&map->q->arena_committed);
	EQUAL(queue_grow_arena(map, had, 4 * had), 0);
	CHECK(arena_extend(&map->q->arena, map->arena, had, 4 * had));
	st(&map->q->arena_committed, 4 * had);
	map_release(map);
	schedule_as(OUTSIDE);
}
/* Two in memory, read from disk; two behind them, there still or never. */
static void begin_read(bool all)
{
	uint64_t half, used;
	uint32_t taken;

	begin_with_supervisor();
	schedule_as(3);
	spill_3();
	half = desc(0)->disk_write;
	if (!all)
		spill_3();
	EQUAL(shmq_restore(k->actors[3].b, k->queue[0], k->disk, half, 0, half, soon(), &taken, &used), 0);
	EQUAL(taken, 2);
	schedule_as(OUTSIDE);
}
static void begin_read_all(void)
{
	begin_read(true);
}
static void begin_read_half(void)
{
	begin_read(false);
}
static void begin_read_half_and_taken(void)
{
	begin_read(false);
	schedule_as(1);
	take(1, 0, 1);
	schedule_as(OUTSIDE);
	k->out_of_order = true;
}
static void begin_came_back(void)
{
	begin_taken();
	schedule_as(1);
	requeue_1();
	schedule_as(OUTSIDE);
}
static void begin_one_died(void)
{
	begin_with_supervisor();
	come_to_take(2, 0);
	schedule_as(2);
	take(2, 0, 2);
	schedule_as(OUTSIDE);
	k->out_of_order = true;
	schedule_kill(2);
}
static void begin_given_back(void)
{
	begin_one_died();
	schedule_as(3);
	reap_3();
	schedule_as(OUTSIDE);
}
static void begin_deferred(void)
{
	begin(1);
	publish(EARLY, 2, in_an_hour());
	come_to_publish(0);
	come_to_take(1, 0);
	come(2, SHMQ_AS_CLIENT);
	come_to_supervise(3);
	k->out_of_order = true;
}
static void begin_backlog(void)
{
	begin(0);
	publish(EARLY, 2, 0);
	come_to_publish(0);
	come_to_take(1, 0);
	come(2, SHMQ_AS_CLIENT);
	come_to_supervise(3);
}
/* A backlog of a paused topic that has got two channels; unpaused, to be pumped. */
static void begin_to_pump(void)
{
	begin(0);
	publish(EARLY, 2, 0);
	EQUAL(shmq_topic_pause(k->w->supervisor, k->topic, k->generation, true, soon()), 0);
	make_queue("channel");
	make_queue("channel");
	k->targets &= ~1u; /* what it has goes to them */
	k->pumps = true;
	EQUAL(shmq_topic_pause(k->w->supervisor, k->topic, k->generation, false, soon()), 0);
	come_to_publish(0);
	come_to_take(1, 1);
	come(2, SHMQ_AS_CLIENT);
	come_to_supervise(3);
}
/* Channel b is made, but not entered. */
static void begin_new_channel(void)
{
	int fd = memfd_create("queue", MFD_CLOEXEC);

	begin(1);
	EQUAL(shmq_queue_reserve(k->w->supervisor, soon(), &k->queue[1], &k->serial[1]), 0);
	k->w->queues[k->serial[1]] = fd;
	EQUAL(shmq_queue_create(k->w->supervisor, fd, k->queue[1], k->serial[1], k->topic, "t:b", 0, 0,
	                        0, false, false),
	      0);
	k->n = 2;
	k->late[1] = true;
	come_to_publish(0);
	come_to_take(1, 0);
	come(2, SHMQ_AS_CLIENT);
	come_to_supervise(3);
}
static void come_to_lease(void)
{
	k->leases = true;
	schedule_as(1);
	EQUAL(shmq_lessee_open(k->actors[1].b, k->queue[0], k->serial[0], "l", 10 * NS_PER_S, NS_PER_S,
	                       soon(), &k->lessee),
	      0);
	schedule_as(OUTSIDE);
}
static void begin_to_lease(void)
{
	begin_with_supervisor();
	come_to_lease();
}
static void begin_read_half_to_lease(void)
{
	begin_read(false);
	come_to_lease();
}
static void begin_leased(void)
{
	begin_to_lease();
	schedule_as(1);
	lease(1, 2);
	schedule_as(OUTSIDE);
	EQUAL(k->lease.count, 2);
}
static void begin_leased_and_came_back(void)
{
	begin_leased();
	schedule_as(1);
	take(1, 0, 1);
	requeue_1();
	schedule_as(OUTSIDE);
	k->out_of_order = true;
}
static void begin_leased_and_spilled(void)
{
	begin_read_half_to_lease();
	schedule_as(1);
	lease(1, 2);
	schedule_as(OUTSIDE);
}
static void begin_to_lease_on_disk(void)
{
	begin_to_lease();
	schedule_as(3);
	spill_3();
	schedule_as(OUTSIDE);
}
static void begin_leased_on_disk(void)
{
	begin_to_lease_on_disk();
	schedule_as(1);
	lease_run(1);
	schedule_as(OUTSIDE);
	EQUAL(k->lease.on_disk, 2);
}
static void begin_to_attach(void)
{
	begin(1);
	for (uint32_t i = 0; i < 2; i++) {
		schedule_as(i);
		EQUAL(shmq_broker_open(k->w->directory, &k->actors[i].b), 0);
		schedule_as(OUTSIDE);
	}
}

static void take_other_1(void)
{
	take(1, 1, 1);
	finish(1, 1, 1);
}
static void finish_rest_1(void) { finish(1, 0, 8); }
static void requeue_with_delay_1(void)
{
	(void)shmq_requeue(k->actors[1].c, k->actors[1].m, k->actors[1].got, NS_PER_S, NULL, soon());
}

static const struct play {
	void (*begin)(void);
	scenario s;
} plays[] = {
#define PLAY(name, begin, ...) {begin, {name, {__VA_ARGS__}, settle, verify, asleep}}
	/* actors: 0 publishes, 1 takes, 2 one or the other, 3 supervises; setup, 0, 1, 2, 3 */
	PLAY("publish, take", begin_publish_and_take, publish_one_0, take_one_1),
	PLAY("publish, take, indices wrap", begin_publish_and_take_wrapping, publish_batch_0, take_two_1),
	PLAY("publish, publish a batch, take", begin_two_publish, publish_one_0, publish_batch_1,
	     take_other_2),
	PLAY("publish, take, take", begin_publish_and_two_take, publish_one_0, take_one_1, take_one_2),
	PLAY("publish, wait", begin_publish_and_take, publish_one_0, wait_1),
	PLAY("publish a batch, wait, wait", begin_publish_and_two_wait, publish_batch_0, wait_1, wait_2),
	PLAY("publish, publish, wait, wait", begin_publish_and_two_wait, publish_twice_0, wait_1, wait_2),
	PLAY("publish, finish", begin_in_flight, publish_batch_0, finish_1),
	PLAY("publish, requeue", begin_in_flight, publish_one_0, requeue_1),
	PLAY("publish, requeue with a delay", begin_in_flight, publish_deferred_0, requeue_with_delay_1),
	PLAY("publish, close", begin_in_flight, publish_one_0, close_1),
	PLAY("publish, pin, finish, unpin", begin_in_flight, publish_batch_0, pin_finish_unpin_1),
	PLAY("lend and commit, take", begin_publish_and_take, loan_and_commit_0, take_one_1),
	PLAY("lend and cancel, finish", begin_in_flight, loan_and_cancel_0, finish_1),
	PLAY("publish, take, pause", begin_with_supervisor, publish_one_0, take_one_1, pause_2),
	PLAY("publish, take, empty", begin_with_supervisor, publish_one_0, take_one_1, empty_2),
	PLAY("publish, take, spill", begin_with_supervisor, publish_one_0, take_one_1, NULL, spill_3),
	PLAY("publish, take, spill in vain", begin_with_supervisor, publish_one_0, take_one_1, NULL,
	     spill_in_vain_3),
	PLAY("publish, take, advance and spill", begin_with_supervisor, publish_one_0, take_two_1, NULL,
	     advance_and_spill_3),
	PLAY("take, empty, spill", begin_with_supervisor, NULL, take_one_1, empty_2, spill_3),
	PLAY("empty, the spill ends", begin_spill_half, NULL, NULL, empty_2, spill_end),
	PLAY("take, rebuild beside a spill", begin_spill_half, NULL, take_one_1, NULL, spill_end),
	PLAY("publish, take, restore", begin_spilled, publish_one_0, take_two_1, NULL, restore_3),
	PLAY("take, empty, restore", begin_spilled, NULL, take_one_1, empty_2, restore_3),
	PLAY("publish, take, spill and restore", begin_with_supervisor, publish_one_0, take_one_1, NULL,
	     spill_and_restore_3),
	PLAY("finish, flush", begin_taken, NULL, finish_1, NULL, flush_3),
	PLAY("finish, empty, flush", begin_taken, NULL, finish_1, empty_2, flush_3),
	PLAY("finish, write ahead", begin_read_half_and_taken, NULL, finish_1, NULL, write_ahead_3),
	PLAY("publish, take, write in front", begin_read_half, publish_one_0, take_one_1, NULL,
	     write_in_front_3),
	PLAY("publish, take, write in front of nothing", begin_read_all, publish_one_0, take_one_1, NULL,
	     write_in_front_3),
	PLAY("publish, take, write in front in vain", begin_read_all, publish_one_0, take_one_1, NULL,
	     write_in_front_in_vain_3),
	PLAY("publish, wait, write in front", begin_read_all, publish_one_0, wait_1, NULL,
	     write_in_front_3),
	PLAY("take, empty, write in front", begin_read_half, NULL, take_one_1, empty_2, write_in_front_3),
	PLAY("finish, rebuild beside a write in front", begin_read_half_and_taken, NULL, finish_1, rebuild_2,
	     write_in_front_3),
	PLAY("lease, write in front", begin_read_half_to_lease, publish_one_0, lease_1, NULL,
	     write_in_front_3),
	PLAY("lease what is on disk, write in front", begin_read_half_to_lease, NULL, lease_run_1, NULL,
	     write_in_front_3),
	PLAY("publish, take, spill what came back", begin_came_back, publish_one_0, take_one_1, NULL,
	     spill_returned_3),
	PLAY("publish, take, spill what was out", begin_given_back, publish_one_0, take_one_1, NULL,
	     spill_out_3),
	PLAY("finish, expire", begin_taken, NULL, finish_1, NULL, expire_3),
	PLAY("touch, expire", begin_taken, NULL, touch_1, NULL, expire_3),
	PLAY("close, expire", begin_taken, NULL, close_1, NULL, expire_3),
	PLAY("publish deferred, take, expire", begin_deferred, publish_deferred_0, take_one_1, NULL,
	     expire_3),
	PLAY("publish deferred, write a chunk", begin_deferred, publish_deferred_0, NULL, NULL,
	     write_chunk_3),
	PLAY("take, a chunk there and back", begin_deferred, NULL, take_one_1, NULL,
	     chunk_there_and_back_3),
	PLAY("empty, a chunk there and back", begin_deferred, NULL, NULL, empty_2,
	     chunk_there_and_back_3),
	PLAY("publish, pump", begin_to_pump, publish_one_0, NULL, NULL, pump_3),
	PLAY("publish, take, pump", begin_to_pump, publish_one_0, take_other_1, NULL, pump_3),
	PLAY("publish, take over", begin_backlog, publish_one_0, NULL, NULL, take_over_3),
	PLAY("publish, a channel comes", begin_new_channel, publish_batch_0, NULL, NULL, enter_channel_3),
	PLAY("lend and commit, a channel comes", begin_new_channel, loan_and_commit_0, NULL, NULL,
	     enter_channel_3),
	PLAY("publish, take, remove", begin_with_supervisor, publish_one_0, take_one_1, NULL,
	     remove_channel_3),
	PLAY("publish, wait, remove", begin_with_supervisor, NULL, wait_1, NULL, remove_channel_3),
	PLAY("publish, take, adopt", begin_spill_half, publish_one_0, take_one_1, NULL, adopt_3),
	PLAY("publish, finish, rebuild", begin_taken, publish_one_0, finish_rest_1, NULL, rebuild_3),
	PLAY("publish, take, reap", begin_one_died, publish_one_0, take_one_1, NULL, reap_3),
	PLAY("publish, lease", begin_to_lease, publish_one_0, lease_1),
	PLAY("publish, lease, empty", begin_to_lease, publish_one_0, lease_1, empty_2),
	PLAY("publish, lease, spill", begin_to_lease, publish_one_0, lease_1, NULL, spill_3),
	PLAY("finish a lease, read it", begin_leased, publish_one_0, lease_finish_1, lease_read_2),
	PLAY("return a lease, read it", begin_leased, publish_one_0, lease_return_1, lease_read_2),
	PLAY("return a lease, one came back", begin_leased_and_came_back, NULL, lease_return_1,
	     lease_read_2),
	PLAY("finish a lease, end it", begin_leased, NULL, lease_finish_1, lease_end_2),
	PLAY("finish a lease, another incarnation", begin_leased, NULL, lease_finish_1, lessee_open_2),
	PLAY("finish a lease, expire", begin_leased, NULL, lease_finish_1, lease_read_2, expire_3),
	PLAY("finish a lease, empty", begin_leased, NULL, lease_finish_1, empty_2),
	PLAY("publish, finish, give back", begin_taken_of_many, publish_one_0, finish_rest_1, NULL,
	     give_back_3),
	PLAY("finish a lease, rebuild", begin_leased, publish_one_0, lease_finish_1, NULL, rebuild_3),
	PLAY("return a lease, restore", begin_leased_and_spilled, NULL, lease_return_1, NULL, restore_3),
	PLAY("finish a lease, flush", begin_leased, NULL, lease_finish_1, lease_read_2, flush_3),
	PLAY("finish a lease, write ahead", begin_leased_and_spilled, NULL, lease_finish_1, NULL,
	     write_ahead_3),
	PLAY("publish, lease what is on disk, restore", begin_to_lease_on_disk, publish_one_0, lease_run_1,
	     NULL, restore_3),
	PLAY("lease what is on disk, empty", begin_to_lease_on_disk, NULL, lease_run_1, empty_2),
	PLAY("finish what is on disk, restore", begin_leased_on_disk, NULL, lease_finish_1, NULL,
	     restore_3),
	PLAY("finish what is on disk, spill", begin_leased_on_disk, publish_one_0, lease_finish_1, NULL,
	     spill_3),
	PLAY("finish what is on disk, empty", begin_leased_on_disk, NULL, lease_finish_1, empty_2),
	PLAY("finish what is on disk, flush", begin_leased_on_disk, NULL, lease_finish_1, NULL, flush_3),
	PLAY("finish what is on disk, expire", begin_leased_on_disk, NULL, lease_finish_1, NULL, expire_3),
	PLAY("return what is on disk, restore", begin_leased_on_disk, publish_one_0, lease_return_1, NULL,
	     restore_3),
	PLAY("publish, detach", begin_in_flight, publish_one_0, detach_1),
	PLAY("attach, attach", begin_to_attach, attach_0, attach_1),
};

/* ---- plants: each has to be found in its scenario ---- */

static const struct {
	const char *scenario;
	enum plant what;
	uint32_t at;
	bounds within;
} plants[] = {
	{"publish, take, take", PLANT_NO_LOCK, 0, {1, 0, 0, 0}},
	{"publish, finish", PLANT_NO_OWNER_DIED, 0, {1, 1, 0, 0}},
	{"publish, wait", PLANT_LOST_POST, 0, {1, 0, 0, 0}},
	{"publish, wait", PLANT_NO_FENCE, 0, {2, 0, 1, 0}},
};

static const struct play *play_of(const char *name)
{
	for (size_t i = 0; i < sizeof(plays) / sizeof(plays[0]); i++)
		if (!strcmp(plays[i].s.name, name))
			return &plays[i];
	return NULL;
}

static outcome search(const struct play *p, bounds within)
{
	outcome o;

	p->begin();
	schedule_begin();
	o = schedule_search(&p->s, within);
	schedule_reset();
	return o;
}

/* In a process of its own: what is built wrong may crash. */
static bool is_found(const struct play *p, enum plant what, uint32_t at, bounds within, bool say)
{
	pid_t pid = fork();
	int status;

	if (!pid) {
		outcome o;

		schedule_plant = what;
		schedule_plant_at = at;
		o = search(p, within);
		if (say)
			printf("%s: %s\n", p->s.name, *o.wrong ? o.wrong : "NOT FOUND");
		fflush(stdout);
		_exit(*o.wrong != 0);
	}
	if (waitpid(pid, &status, 0) != pid)
		abort();
	if (say && WIFSIGNALED(status))
		printf("%s: crashes\n", p->s.name);
	return status != 0;
}

/* Every store of a publish, take, finish and spill left out, one at a time. */
static bool lost_stores_are_found(void)
{
	static const char *const names[] = {"publish, take", "publish, finish", "publish, take, spill"};
	uint32_t found = 0, all = 0;

	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
		for (uint32_t at = 1; at <= 24; at++, all++)
			found += is_found(play_of(names[i]), PLANT_LOST_STORE, at, (bounds){1, 1, 0, 1000}, false);
	printf("one store left out: %u of %u are found (counters and hints may be missed)\n", found, all);
	return found >= all / 2;
}

static int plants_are_found(void)
{
	int missed = 0;

	for (size_t i = 0; i < sizeof(plants) / sizeof(plants[0]); i++)
		missed += !is_found(play_of(plants[i].scenario), plants[i].what, plants[i].at,
		                    plants[i].within, true);
	missed += !lost_stores_are_found();
	return missed != 0;
}

int main(int argc, char **argv)
{
	static const bounds few[] = {{2, 0, 0, 4000}, {1, 1, 0, 4000}, {1, 0, 1, 2000}};
	static const bounds many[] = {
	        {3, 0, 0, 200000}, {2, 1, 0, 200000}, {1, 2, 0, 200000}, {2, 0, 1, 200000}};
	bool whole = argc > 1 && !strcmp(argv[1], "--whole");
	const bounds *all = whole ? many : few;
	size_t n = whole ? sizeof(many) / sizeof(many[0]) : sizeof(few) / sizeof(few[0]);
	int wrong = 0;

	if (argc > 1 && !strcmp(argv[1], "--plants"))
		return plants_are_found();
	printf("%-40s %9s %9s %7s  %s\n", "at the same time", "runs", "deaths", "points", "within bounds");
	for (size_t i = 0; i < sizeof(plays) / sizeof(plays[0]); i++) {
		outcome sum = {.whole = true};

		if (argc > 1 + whole && strcmp(argv[1 + whole], plays[i].s.name))
			continue;
		for (size_t k_ = 0; k_ < n && !*sum.wrong; k_++) {
			outcome o = search(&plays[i], all[k_]);

			sum.runs += o.runs;
			sum.deaths += o.deaths;
			sum.points = o.points > sum.points ? o.points : sum.points;
			sum.whole &= o.whole;
			memcpy(sum.wrong, o.wrong, sizeof(o.wrong));
		}
		printf("%-40s %9llu %9llu %7u  %s%s\n", plays[i].s.name, (unsigned long long)sum.runs,
		       (unsigned long long)sum.deaths, sum.points, sum.whole ? "all" : "part", sum.wrong);
		fflush(stdout);
		wrong += *sum.wrong != 0;
	}
	return wrong != 0;
}
