/* Plays: a results store. Each actor has a handle of its own; OUTSIDE looks at the end. */
#include "../checker_store.h"
#include "memory/store_handle.h"
#include "shmq_store.h"
#include "stage.h"

/* In the heap that every run finds as it was. */
static struct board {
	shmq_store *store[ACTORS + 1];
	uint32_t set_begun, set_done; /* the last value that a set of "k" began, returned with */
	uint32_t seen;                /* the last value that a get of "k" returned */
	uint32_t adds, added, dead_adds;
	uint32_t counts, counted;
	uint32_t popped;
	bool removes, deletes;
} *board;

static shmq_body text(const char *words)
{
	return (shmq_body){words, strlen(words)};
}

/* ---- one key with values that rise: "k" has the number twice ---- */

static void store_value(uint32_t who, uint32_t number, bool only_if_absent, bool *stored)
{
	uint32_t words[2] = {number, number};
	shmq_body key = text("k"), value = {words, sizeof(words)};
	int r = shmq_store_set(board->store[who], &key, &value, INT64_MAX, only_if_absent, soon(),
	                       stored);

	CHECK(r == 0 || (r == SHMQ_GONE && board->removes));
	*stored = *stored && !r;
}

static void set(uint32_t who, uint32_t number)
{
	bool stored = false;

	board->set_begun = number;
	store_value(who, number, false, &stored);
	if (stored)
		board->set_done = number;
}

/* The number; 0: the key is absent. */
static uint32_t value_of(uint32_t who, bool take)
{
	uint32_t words[2];
	shmq_body key = text("k");
	uint64_t length;
	int r = shmq_store_get(board->store[who], &key, take, soon(), words, sizeof(words), &length);

	if (r == SHMQ_EMPTY || (r == SHMQ_GONE && board->removes))
		return 0;
	EQUAL(r, 0);
	EQUAL(length, sizeof(words));
	if (words[0] != words[1])
		schedule_fail("a value is torn");
	return words[0];
}

static void look(uint32_t who)
{
	uint32_t sure = board->set_done, seen = board->seen, number = value_of(who, false);

	if (board->deletes || board->removes)
		return;
	if (number < sure || number < seen)
		schedule_fail("an old value came back: %u after %u, %u", number, sure, seen);
	CHECK(number <= board->set_begun);
	board->seen = number;
}

static void set_0(void)
{
	set(0, 2);
}

static void set_twice_0(void)
{
	set(0, 2);
	set(0, 3);
}

static void get_twice_1(void)
{
	look(1);
	look(1);
}

static void get_2(void)
{
	look(2);
}

static void pop(uint32_t who)
{
	board->popped += value_of(who, true) != 0;
}

static void pop_1(void)
{
	pop(1);
}

static void pop_2(void)
{
	pop(2);
}

static void add(uint32_t who)
{
	bool stored = false;

	board->adds++;
	store_value(who, 1 + who, true, &stored);
	board->added += stored;
	board->adds--;
}

static void add_0(void)
{
	add(0);
}

static void add_1(void)
{
	add(1);
}

static void count(uint32_t who)
{
	shmq_body key = text("n");
	int64_t value;
	bool changed;

	board->counts++;
	EQUAL(shmq_store_incr(board->store[who], &key, &(shmq_store_step){1, 0, 3, INT64_MAX, false},
	                      soon(), &value, &changed),
	      0);
	CHECK(changed);
	board->counted++;
}

static void count_0(void)
{
	count(0);
}

static void count_1(void)
{
	count(1);
}

static void wait_for_it(uint32_t who)
{
	shmq_store *s = board->store[who];
	shmq_body key = text("k");
	int64_t deadline = shmq_now() + 5 * NS_PER_S;
	uint32_t seen[SHMQ_STRIPES];

	for (;;) {
		int r;

		shmq_store_seen(s, seen);
		if (value_of(who, false))
			return;
		r = shmq_store_wait(s, NULL, UINT64_C(1) << shmq_store_stripe(s, &key), seen, deadline);
		if (r)
			return;
	}
}

static void wait_for_it_1(void)
{
	wait_for_it(1);
}

static void wait_for_it_2(void)
{
	wait_for_it(2);
}

static void sweep_3(void)
{
	uint32_t expired;
	bool more;

	EQUAL(shmq_store_sweep(board->store[3], shmq_now() + NS_PER_S, 100, soon(), &expired, &more),
	      0);
}

static void trim_3(void)
{
	uint64_t bytes;

	EQUAL(shmq_store_trim(board->store[3], soon(), &bytes), 0);
}

static void retire_3(void)
{
	EQUAL(shmq_store_retire(board->store[3], soon()), 0);
	EQUAL(shmq_store_remove(k->actors[3].b, 0, board->store[3]->serial, soon()), 0);
}

/* ---- before and after ---- */

static void open_for(uint32_t who, shmq_broker *b)
{
	uint64_t serial;
	uint32_t store;

	EQUAL(shmq_store_find(b, "r", &store, &serial), 0);
	EQUAL(shmq_store_open(b, store, serial, k->w->queues[serial], &board->store[who]), 0);
}

static void begin_empty(void)
{
	shmq_store_spec spec = {.max_keys = 20, .max_bytes = 1 << 16, .name = "r"};

	begin(1);
	board = schedule_alloc(sizeof(*board));
	EQUAL(shmq_store_reserve(k->w->supervisor, soon(), &spec.store, &spec.serial), 0);
	k->w->queues[spec.serial] = memfd_create("store", MFD_CLOEXEC);
	EQUAL(shmq_store_create(k->w->supervisor, k->w->queues[spec.serial], &spec), 0);
	EQUAL(shmq_store_enter(k->w->supervisor, &spec, soon()), 0);
	open_for(OUTSIDE, k->w->supervisor);
	for (uint32_t who = 0; who < ACTORS; who++) {
		come(who, SHMQ_AS_CLIENT);
		schedule_as(who);
		open_for(who, k->actors[who].b);
		schedule_as(OUTSIDE);
	}
}

static void begin_with_a_value(void)
{
	begin_empty();
	set(OUTSIDE, 1);
}

static void begin_to_pop(void)
{
	begin_with_a_value();
	board->deletes = true;
}

static void begin_to_remove(void)
{
	begin_empty();
	board->removes = true;
}

static void begin_expired(void)
{
	shmq_body key = text("k"), value = text("old");
	bool stored;

	begin_empty();
	EQUAL(shmq_store_set(board->store[OUTSIDE], &key, &value, 1, false, soon(), &stored), 0);
}

static bool store_asleep(uint32_t who)
{
	(void)who;
	return !board->set_done && !board->removes;
}

static void store_verify(void)
{
	shmq_store *s = board->store[OUTSIDE];
	shmq_body number = text("n");
	uint64_t length;
	char digits[8] = "";
	const char *says;
	uint32_t value = value_of(OUTSIDE, false); /* it repairs */
	int r;

	if (board->removes && s->d->segment.ready == SHMQ_CLOSED_STATE) {
		verify();
		return;
	}
	says = checker_store(s->base);
	if (*says)
		schedule_fail("the store: %s", says);
	if (!board->deletes && !board->removes && board->set_begun)
		CHECK(value >= board->set_done && value >= board->seen && value <= board->set_begun);
	if (board->deletes)
		CHECK(board->popped <= 1 + (board->set_begun > 1));
	if (board->added)
		CHECK(board->added == 1 && value);
	r = shmq_store_get(s, &number, false, soon(), digits, sizeof(digits), &length);
	if (board->counts) {
		EQUAL(r == 0 || board->counted == 0, 1);
		CHECK(atoi(digits) >= (int)board->counted && atoi(digits) <= (int)board->counts);
	}
	verify();
}

#undef PLAY
#define PLAY(name, begin, ...)                                                                     \
	{                                                                                              \
		begin,                                                                                     \
		{                                                                                          \
			name, {__VA_ARGS__}, settle, store_verify, store_asleep                                \
		}                                                                                          \
	}

static const play table[] = {
	PLAY("set, get, get", begin_with_a_value, set_twice_0, get_twice_1, get_2),
	PLAY("set, wait", begin_empty, set_0, wait_for_it_1),
	PLAY("set, wait, wait", begin_empty, set_0, wait_for_it_1, wait_for_it_2),
	PLAY("add, add", begin_empty, add_0, add_1),
	PLAY("count, count", begin_empty, count_0, count_1),
	PLAY("pop, pop", begin_to_pop, NULL, pop_1, pop_2),
	PLAY("set, pop, pop", begin_to_pop, set_0, pop_1, pop_2),
	PLAY("set, get, sweep", begin_expired, set_0, NULL, NULL, sweep_3),
	PLAY("set, trim", begin_with_a_value, set_twice_0, get_twice_1, NULL, trim_3),
	PLAY("set, wait, remove", begin_to_remove, set_0, wait_for_it_1, NULL, retire_3),
};

const plays store_plays = {table, sizeof(table) / sizeof(table[0])};
