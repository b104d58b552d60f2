/* The allocator of message bodies against a list of what it gave out. */
#include "harness.h"

#define SIZE (1u << 20)
#define LIVE 300u

typedef struct given {
	uint64_t body;
	uint32_t capacity;
	uint8_t mark;
} given;

static uint8_t base[SIZE] __attribute__((aligned(64)));
static shmq_arena_desc arena;
static given live[LIVE];
static uint32_t count;

static uint32_t seed = 1;

static uint32_t chance(uint32_t below)
{
	seed = seed * 1664525u + 1013904223u;
	return (uint32_t)((uint64_t)seed * below >> 32);
}

static uint32_t free_blocks(void)
{
	uint32_t n = 0;

	for (unsigned f = 0; f < SHMQ_ARENA_FL; f++)
		for (unsigned s = 0; s < SHMQ_ARENA_SL; s++)
			for (uint64_t at = arena.heads[f][s]; at; n++)
				at = *(uint64_t *)(void *)(base + at - 1 + 16);
	return n;
}

static uint64_t end; /* of the committed part */

static void check_all(uint64_t committed)
{
	uint64_t used = 0;

	for (uint32_t i = 0; i < count; i++) {
		used += live[i].capacity + SHMQ_ARENA_HEAD;
		EQUAL(live[i].body % 64, 16);
		CHECK(live[i].body + live[i].capacity <= committed - SHMQ_ARENA_UNIT);
		for (uint32_t k = 0; k < live[i].capacity; k++)
			EQUAL(base[live[i].body + k], live[i].mark);
	}
	EQUAL(arena.free_bytes + used, committed - SHMQ_ARENA_UNIT);
}

static bool give(uint32_t length)
{
	given *g = &live[count];

	g->body = arena_alloc(&arena, base, end, length, &g->capacity);
	if (g->body == ARENA_FAILED)
		return false;
	CHECK(g->capacity >= length);
	EQUAL(g->capacity + SHMQ_ARENA_HEAD, arena_block_size(length));
	g->mark = (uint8_t)chance(256);
	memset(base + g->body, g->mark, g->capacity); /* an overlap shows at the next check */
	count++;
	return true;
}

static void take_back(uint32_t i)
{
	CHECK(arena_free(&arena, base, end, live[i].body, live[i].capacity));
	live[i] = live[--count];
}

static void begin(uint64_t committed)
{
	memset(base, 0xa5, sizeof(base));
	end = committed;
	arena_init(&arena, base, committed);
	count = 0;
}

static void blocks_never_overlap_and_coalesce_into_one(void)
{
	for (int round = 0; round < 20; round++) {
		uint32_t largest = 64u << round % 11;

		begin(SIZE);
		for (int step = 0; step < 3000; step++) {
			if (count && (count == LIVE || chance(5) < 2))
				take_back(chance(count));
			else if (!give(1 + chance(largest)) && count)
				take_back(chance(count));
			if (step % 300 == 0)
				check_all(SIZE);
		}
		check_all(SIZE);
		while (count)
			take_back(chance(count));
		EQUAL(arena.free_bytes, SIZE - SHMQ_ARENA_UNIT);
		EQUAL(free_blocks(), 1);
		CHECK(give(SIZE - SHMQ_ARENA_UNIT - SHMQ_ARENA_HEAD)); /* and all of it can be had */
		EQUAL(free_blocks(), 0);
	}
}

static void it_grows_with_blocks_in_use(void)
{
	for (uint64_t committed = 32768; committed < SIZE; committed *= 2) {
		if (committed == 32768)
			begin(committed);
		while (count < LIVE - 4 && give(1 + chance(3000)))
			;
		check_all(committed);
		if (chance(2) && count)
			take_back(count - 1); /* the block before the old end is free, or is not */
		CHECK(arena_extend(&arena, base, committed, 2 * committed));
		end = 2 * committed;
		check_all(2 * committed);
	}
	CHECK(give(SIZE / 4));
	while (count)
		take_back(chance(count));
	EQUAL(free_blocks(), 1);
	EQUAL(arena.free_bytes, SIZE - SHMQ_ARENA_UNIT);
}

static int by_body(const void *x, const void *y)
{
	const given *a = x, *b = y;

	return a->body < b->body ? -1 : a->body > b->body;
}

static void a_rebuild_from_what_is_owned_is_the_same_arena(void)
{
	for (int round = 0; round < 50; round++) {
		arena_cursor cursor = {0, 0};
		uint64_t free_bytes;
		uint32_t blocks;

		begin(SIZE);
		for (int step = 0; step < 500; step++)
			if (count && (count == LIVE || chance(3) == 0))
				take_back(chance(count));
			else
				(void)give(1 + chance(9000));
		free_bytes = arena.free_bytes;
		blocks = free_blocks();
		qsort(live, count, sizeof(*live), by_body);
		memset(&arena, round % 2 ? 0xff : 0, offsetof(shmq_arena_desc, reserved));
		for (uint32_t i = 0; i < count; i++) /* the tags are gone as well */
			memset(base + live[i].body - SHMQ_ARENA_HEAD, 0xff, SHMQ_ARENA_HEAD);
		arena_reset(&arena);
		for (uint32_t i = 0; i < count; i++)
			CHECK(arena_claim(&arena, base, SIZE, &cursor, live[i].body, live[i].capacity));
		arena_seal(&arena, base, SIZE, &cursor);
		EQUAL(arena.free_bytes, free_bytes);
		EQUAL(free_blocks(), blocks);
		check_all(SIZE);
		for (int step = 0; step < 200; step++) /* and it works on */
			if (count && (count == LIVE || chance(2)))
				take_back(chance(count));
			else
				(void)give(1 + chance(9000));
		check_all(SIZE);
		while (count)
			take_back(chance(count));
		EQUAL(free_blocks(), 1);
	}
}

static void garbage_is_not_claimed(void)
{
	static const struct {
		uint64_t body;
		uint32_t capacity;
	} garbage[] = {
		{0, 48},               /* no room for its head */
		{15, 48},              /* before the arena */
		{UINT64_MAX, 48},      /* past any arena */
		{UINT64_MAX - 47, 48}, /* wraps */
		{17, 48},              /* not at a block */
		{16, 47},              /* not a multiple */
		{16, UINT32_MAX},      /* longer than all */
		{16, SIZE - 16},       /* over the sentinel */
		{SIZE - 64 + 16, 48},  /* the sentinel */
		{SIZE + 16, 48},       /* after it */
		{64 + 16, 48},         /* inside the one claimed before */
	};
	arena_cursor cursor = {0, 0};

	begin(SIZE);
	arena_reset(&arena);
	CHECK(arena_claim(&arena, base, SIZE, &cursor, 16, 176)); /* [0, 192) */
	for (size_t i = 0; i < sizeof(garbage) / sizeof(garbage[0]); i++)
		CHECK(!arena_claim(&arena, base, SIZE, &cursor, garbage[i].body, garbage[i].capacity));
	arena_seal(&arena, base, SIZE, &cursor);
	EQUAL(arena.free_bytes, SIZE - 64 - 192);
	count = 0;
	while (count < LIVE && give(3000))
		;
	for (uint32_t i = 0; i < count; i++)
		CHECK(live[i].body > 192);
}

/* One bit of a capacity that garbage has changed: it hides behind the bit of the tag. */
static void a_capacity_that_is_one_off_owns_no_block(void)
{
	begin(SIZE);
	CHECK(give(100));
	CHECK(arena_owns(base, SIZE, live[0].body, live[0].capacity));
	for (uint32_t bit = 1; bit; bit <<= 1)
		CHECK(!arena_owns(base, SIZE, live[0].body, live[0].capacity ^ bit));
}

int main(void)
{
	blocks_never_overlap_and_coalesce_into_one();
	it_grows_with_blocks_in_use();
	a_rebuild_from_what_is_owned_is_the_same_arena();
	garbage_is_not_claimed();
	a_capacity_that_is_one_off_owns_no_block();
	return 0;
}
