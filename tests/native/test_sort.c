/* The sort of ring entries against qsort, at every bound of its parts; and what it leaves alone. */
#include "one_queue.h"
#include "queue/sort.h"

#include <pthread.h>

#define N 70000u
#define CAPACITY 131072u /* of the ring */

static shmq_queue_desc q;
static shmq_slot_desc slots[N];
static uint32_t ring[CAPACITY], before[CAPACITY], wanted[N];
static int64_t when[N];
static uint32_t slot_at[N];
static _Atomic uint32_t length, most = N;
static shmq_map map;
static uint64_t seed = 11;
static uint32_t reads;

static uint64_t any(void)
{
	seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
	return seed ^ seed >> 29;
}

static void setup(uint32_t used)
{
	st(&q.slots_committed, N);
	st(&q.ring_mask, CAPACITY - 1);
	st(&q.dirty, 0);
	map.q = &q;
	map.slots = slots;
	st(&map.slots_backed, N);
	st(&map.rings_backed, CAPACITY - 1);
	map.deferred = (heap){when, slot_at, &length, slots, &most, &q.dirty};
	st(&length, used);
	for (uint32_t i = 0; i < N; i++)
		when[i] = (int64_t)i;
	for (uint32_t i = 0; i < CAPACITY; i++)
		ring[i] = UINT32_MAX - i;
}

static uint64_t key_of(const shmq_slot_desc *s)
{
	reads++;
	return s->order;
}

static int by_key(const void *x, const void *y)
{
	uint64_t a = slots[*(const uint32_t *)x].order, b = slots[*(const uint32_t *)y].order;

	return a < b ? -1 : a > b;
}

static int by_number(const void *x, const void *y)
{
	uint32_t a = *(const uint32_t *)x, b = *(const uint32_t *)y;

	return a < b ? -1 : a > b;
}

/* The keys of the entry i of n. `distinct`: no two entries have the same one. */
enum kind { RISING, FALLING, SHUFFLED, SPARSE, WILD, TWO_RANGES, ALMOST, FEW_VALUES, ONE_VALUE };
#define KINDS 9
#define DISTINCT FEW_VALUES /* the kinds before it */

static uint64_t key_at(enum kind kind, uint32_t i, uint32_t n)
{
	switch (kind) {
	case RISING:
		return UINT64_C(1) << 40 | i;
	case FALLING:
		return UINT64_MAX - i;
	case SHUFFLED:
	case ALMOST:
		return 5 + (uint64_t)i;
	case SPARSE: /* every seventh number is missing, and a gap in the middle */
		return (uint64_t)i + i / 6 + (i > n / 2 ? 100000 : 0);
	case WILD: /* from 0 to the greatest number */
		return i ? UINT64_MAX - (any() << 17 | i) : 0;
	case TWO_RANGES: /* as in a requeue ring: sequence numbers and orders of return */
		return i % 2 ? SHMQ_ORDER_FIRST + i : i;
	case FEW_VALUES:
		return any() % 3 << 60;
	case ONE_VALUE:
		return 9;
	}
	return 0;
}

static void fill(enum kind kind, uint32_t base, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		wanted[i] = (i * 7919u + 3) % N; /* any slots, in any order */
		slots[wanted[i]].order = key_at(kind, i, n);
	}
	if (kind == ALMOST && n > 1) { /* the last two are swapped */
		uint32_t last = wanted[n - 1];

		wanted[n - 1] = wanted[n - 2];
		wanted[n - 2] = last;
	}
	for (uint32_t i = n; i > 1 && kind != RISING && kind != FALLING && kind != ALMOST; i--) {
		uint32_t j = (uint32_t)(any() % i), other = wanted[i - 1];

		wanted[i - 1] = wanted[j];
		wanted[j] = other;
	}
	for (uint32_t i = 0; i < n; i++)
		ring[(base + i) & (CAPACITY - 1)] = wanted[i];
	memcpy(before, ring, sizeof(ring));
}

/* The sorted entries are right, and nothing else has moved. */
static void check_sorted(enum kind kind, uint32_t base, uint32_t n, uint32_t used)
{
	static uint32_t found[N], had[N];

	for (uint32_t i = 0; i < n; i++) {
		had[i] = wanted[i];
		found[i] = ring[(base + i) & (CAPACITY - 1)];
	}
	qsort(wanted, n, sizeof(*wanted), by_key);
	for (uint32_t i = 0; i < n; i++) {
		EQUAL(slots[found[i]].order, slots[wanted[i]].order);
		if (kind < DISTINCT)
			EQUAL(found[i], wanted[i]);
	}
	qsort(found, n, sizeof(*found), by_number);
	qsort(had, n, sizeof(*had), by_number);
	CHECK(!memcmp(found, had, n * sizeof(*had)));
	for (uint32_t i = n; i < CAPACITY; i++)
		EQUAL(ring[(base + i) & (CAPACITY - 1)], before[(base + i) & (CAPACITY - 1)]);
	for (uint32_t i = 0; i < N; i++)
		if (i < used || i >= used + n)
			EQUAL(when[i], i);
	EQUAL(ld(&q.dirty), 0);
}

static void sort_once(enum kind kind, uint32_t base, uint32_t n, uint32_t used)
{
	setup(used);
	fill(kind, base, n);
	reads = 0;
	sort_slots(&map, ring, base, n, key_of, &map.deferred);
	EQUAL(reads, n); /* a comparison that looks at a slot waits for memory */
	check_sorted(kind, base, n, used);
}

static void like_a_plain_sort(void)
{
	static const uint32_t sizes[] = {0,   1,   2,   3,   31,   32,   33,    34,    63,
	                                 255, 256, 257, 511, 1000, 8191, 65535, 65536, 65537};

	for (int kind = 0; kind < KINDS; kind++) {
		for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++)
			sort_once((enum kind)kind, CAPACITY - sizes[i] / 2, sizes[i], N - sizes[i]);
		for (int i = 0; i < 15; i++)
			sort_once((enum kind)kind, (uint32_t)any(), (uint32_t)(any() % 3000), 17);
	}
	sort_once(SHUFFLED, UINT32_MAX - 100, N, 0);
}

static void what_is_in_order_does_not_move(void)
{
	setup(0);
	fill(ONE_VALUE, 0, 1000);
	sort_slots(&map, ring, 0, 1000, key_of, &map.deferred);
	CHECK(!memcmp(ring, before, sizeof(ring)));
}

static void without_room_the_queue_is_dirty(void)
{
	static const uint32_t lengths[] = {N - 99, N, N + 1, UINT32_MAX};

	for (size_t i = 0; i < sizeof(lengths) / sizeof(*lengths); i++) {
		setup(lengths[i]);
		fill(SHUFFLED, 0, 100);
		sort_slots(&map, ring, 0, 100, key_of, &map.deferred);
		CHECK(!memcmp(ring, before, sizeof(ring)));
		EQUAL(ld(&q.dirty), 1);
	}
}

static void entries_that_name_no_slot_stay_inside(void)
{
	setup(0);
	fill(SHUFFLED, 0, 1000);
	for (uint32_t i = 0; i < 1000; i += 3)
		ring[i] = UINT32_MAX - i;
	sort_slots(&map, ring, 0, 1000, key_of, &map.deferred);
	for (uint32_t i = 1000; i < CAPACITY; i++)
		EQUAL(ring[i], UINT32_MAX - i);
}

#ifndef __SANITIZE_THREAD__ /* two threads race on purpose */
static _Atomic bool over;

static void *scribble(void *argument)
{
	volatile int64_t *keys = when;
	uint64_t x = 1;

	(void)argument;
	while (!ld(&over)) {
		x = x * UINT64_C(6364136223846793005) + 1;
		keys[x >> 33 & 4095] = (int64_t)x;
	}
	return NULL;
}

/* Some process overwrites the scratch space meanwhile: any order, but no entry outside. */
static void keys_that_change_meanwhile_do_no_harm(void)
{
	pthread_t thread;

	setup(0);
	EQUAL(pthread_create(&thread, NULL, scribble, NULL), 0);
	for (int round = 0; round < 300; round++) {
		fill(round % 2 ? SHUFFLED : WILD, 5, 4096);
		sort_slots(&map, ring, 5, 4096, key_of, &map.deferred);
		for (uint32_t i = 0; i < CAPACITY; i++)
			if (i < 5 || i >= 5 + 4096)
				EQUAL(ring[i], UINT32_MAX - i);
			else
				CHECK(ring[i] < N);
	}
	st(&over, true);
	EQUAL(pthread_join(thread, NULL), 0);
}
#endif

/* ---- a queue whose slots hold their messages in another order ---- */

#define MESSAGES 3000u

static void publish_them(stage *x, uint32_t from)
{
	char text[200];

	for (uint32_t i = from; i < from + MESSAGES; i++) {
		/* different sizes, so that the blocks of the bodies are in another order, too */
		snprintf(text, sizeof(text), "%u%*s", i, (int)(i * 37 % 150), "");
		EQUAL(world_publish(x->w, x->b, x->p, text), 0);
	}
}

static void take_them(stage *x, uint32_t from, shmq_message *m)
{
	uint32_t got;

	for (uint32_t i = 0; i < MESSAGES; i += got) {
		EQUAL(shmq_take(x->c, m + i, MESSAGES - i, soon(), &got), 0);
		for (uint32_t k = i; k < i + got; k++)
			EQUAL(strtoul((const char *)m[k].body, NULL, 10), from + k);
	}
}

static void a_rebuild_keeps_the_order_of_shuffled_slots(void)
{
	static shmq_message m[MESSAGES];
	stage x = stage_open(small_limits(MESSAGES, MESSAGES), "c");

	publish_them(&x, 0);
	take_them(&x, 0, m);
	for (uint32_t i = MESSAGES; i > 1; i--) {
		uint32_t j = (uint32_t)(any() % i);
		shmq_message other = m[i - 1];

		m[i - 1] = m[j];
		m[j] = other;
	}
	EQUAL(shmq_finish(x.c, m, MESSAGES, NULL, soon()), 0);
	publish_them(&x, MESSAGES);
	EQUAL(MAPPED(x.w, x.s, shmq_rebuild(x.s, x.queue, soon())), 0);
	SOUND(x.w);
	take_them(&x, MESSAGES, m);
	/* Those of the dead: in the order of delivery, whatever slots they are in. */
	EQUAL(shmq_consumer_close(x.c, soon()), 0);
	shmq_consumer_free(x.c);
	SOUND(x.w);
	x.c = world_consumer(x.w, x.b, x.queue, x.serial, MESSAGES);
	take_them(&x, MESSAGES, m);
	EQUAL(shmq_finish(x.c, m, MESSAGES, NULL, soon()), 0);
	stage_close(x);
}

/* Deferred messages go to disk by due time, those of one due time by id. */
static void deferred_messages_of_one_time_are_in_the_order_of_publishing(void)
{
	enum { DEFERRED = 200 };
	static uint32_t chosen[DEFERRED], lengths[DEFERRED];
	static uint64_t positions[DEFERRED];
	stage x = stage_open(small_limits(300, 300), "c");
	shmq_map *view = world_view(x.w, x.queue);
	int64_t due = shmq_realtime() + 1000 * NS_PER_S;
	shmq_spill batch = {.slots = chosen, .lengths = lengths, .positions = positions};
	shmq_body body = {"later", 5};
	uint64_t id;

	for (int i = 0; i < DEFERRED; i++)
		EQUAL(MAPPED(x.w, x.b,
		             shmq_publish(x.p, &body, 1, due + i * 7 % 5 * NS_PER_S, soon(), &id)),
		      0);
	EQUAL(shmq_chunk_begin(x.s, x.queue,
	                       &(shmq_chunk_wish){.chunk = 1, .n = DEFERRED, .max_bytes = UINT64_MAX},
	                       soon(), &batch),
	      0);
	EQUAL(batch.count, DEFERRED);
	for (uint32_t i = 1; i < DEFERRED; i++) {
		CHECK(positions[i - 1] <= positions[i]);
		CHECK(positions[i - 1] < positions[i] ||
		      view->slots[chosen[i - 1]].id < view->slots[chosen[i]].id);
	}
	EQUAL(shmq_spill_end(x.s, &batch, 0, false, soon()), 0); /* they stay in memory */
	stage_close(x);
}

int main(void)
{
	like_a_plain_sort();
	what_is_in_order_does_not_move();
	without_room_the_queue_is_dirty();
	entries_that_name_no_slot_stay_inside();
#ifndef __SANITIZE_THREAD__
	keys_that_change_meanwhile_do_no_harm();
#endif
	a_rebuild_keeps_the_order_of_shuffled_slots();
	deferred_messages_of_one_time_are_in_the_order_of_publishing();
	return 0;
}
