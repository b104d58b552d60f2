#include "memory/arena.h"

#include "base/bounds.h"

#include <string.h>

#define UNIT SHMQ_ARENA_UNIT
#define HEAD SHMQ_ARENA_HEAD
#define IN_USE UINT64_C(1)

typedef struct block {
	uint64_t size_flags;
	uint64_t before; /* size of the block before; 0: none */
	uint64_t next;   /* only in a free block: offset + 1 of its list neighbours, 0: none */
	uint64_t previous;
} block;

static block *block_at(uint8_t *base, uint64_t offset)
{
	return (block *)(void *)(base + offset);
}

static uint64_t block_size(const block *b)
{
	return once(b->size_flags) & ~(uint64_t)(UNIT - 1);
}

uint64_t arena_block_size(uint64_t length)
{
	return (length + HEAD + UNIT - 1) & ~(uint64_t)(UNIT - 1);
}

/* The list a block of `size` belongs to: first level by power of two, second by its next 3 bits. */
static void bin_of(uint64_t size, unsigned *f, unsigned *s)
{
	unsigned top = 63 - (unsigned)__builtin_clzll(size);

	if (top < 9) { /* under 512: one list a unit */
		*f = 0;
		*s = (unsigned)(size / UNIT);
	} else {
		*f = top - 8;
		*s = (unsigned)(size >> (top - 3)) & 7;
	}
	if (*f >= SHMQ_ARENA_FL) {
		*f = SHMQ_ARENA_FL - 1;
		*s = SHMQ_ARENA_SL - 1;
	}
}

/* Returns true if a block of at least one unit may begin here. The sentinel is one. */
static bool block_in(uint64_t committed, uint64_t offset)
{
	return TRUST_CHECK(offset % UNIT == 0 && offset <= committed - UNIT);
}

/* The size of the block at this offset, or 0 if the stored size is impossible. */
static uint64_t size_in(uint8_t *base, uint64_t committed, uint64_t offset)
{
	uint64_t size = block_size(block_at(base, offset));

	return TRUST_CHECK(size && size <= committed - UNIT - offset) ? size : 0;
}

static bool list_push(shmq_arena_desc *a, uint8_t *base, uint64_t committed, uint64_t offset,
                      uint64_t size)
{
	block *b = block_at(base, offset);
	uint64_t next;
	unsigned f, s;

	bin_of(size, &f, &s);
	next = once(a->heads[f][s]);
	b->next = next;
	b->previous = 0;
	if (next) {
		if (!block_in(committed, next - 1))
			return false;
		block_at(base, next - 1)->previous = offset + 1;
	}
	a->heads[f][s] = offset + 1;
	a->sl[f] |= (uint8_t)(1u << s);
	a->fl |= 1u << f;
	a->free_bytes += size;
	return true;
}

/* Both neighbours, or the list's head, must know this block. */
static bool list_remove(shmq_arena_desc *a, uint8_t *base, uint64_t committed, uint64_t offset,
                        uint64_t size)
{
	block *b = block_at(base, offset);
	uint64_t next = once(b->next), previous = once(b->previous);
	unsigned f, s;

	bin_of(size, &f, &s);
	if (next && !(block_in(committed, next - 1) &&
	              TRUST_CHECK(block_at(base, next - 1)->previous == offset + 1)))
		return false;
	if (previous ? !(block_in(committed, previous - 1) &&
	                 TRUST_CHECK(block_at(base, previous - 1)->next == offset + 1))
	             : !TRUST_CHECK(a->heads[f][s] == offset + 1))
		return false;
	if (next)
		block_at(base, next - 1)->previous = previous;
	if (previous)
		block_at(base, previous - 1)->next = next;
	else
		a->heads[f][s] = next;
	if (!a->heads[f][s]) {
		a->sl[f] &= (uint8_t)~(1u << s);
		if (!a->sl[f])
			a->fl &= ~(1u << f);
	}
	a->free_bytes -= size;
	return true;
}

/* Find a block of at least `size` bytes: the first in a higher list, or one of the list of this
 * size that is large enough. */
static uint64_t find(shmq_arena_desc *a, uint8_t *base, uint64_t committed, uint64_t size)
{
	unsigned f, s;
	uint32_t firsts, seconds;
	uint64_t at;

	bin_of(size, &f, &s);
	at = once(a->heads[f][s]);
	for (int tries = 8; at && tries--; at = once(block_at(base, at - 1)->next)) {
		if (!block_in(committed, at - 1))
			return ARENA_BROKEN;
		if (block_size(block_at(base, at - 1)) >= size)
			return at - 1;
	}
	seconds = s == 7 ? 0 : a->sl[f] & (0xffu << (s + 1));
	if (!seconds) {
		firsts = f == 31 ? 0 : a->fl & (0xffffffffu << (f + 1));
		if (!firsts)
			return ARENA_FAILED;
		f = (unsigned)__builtin_ctz(firsts);
		seconds = a->sl[f];
	}
	at = seconds ? once(a->heads[f][__builtin_ctz(seconds)]) : 0;
	return at && block_in(committed, at - 1) ? at - 1 : ARENA_BROKEN;
}

void arena_reset(shmq_arena_desc *a)
{
	memset(a, 0, offsetof(shmq_arena_desc, reserved));
}

static bool make_free(shmq_arena_desc *a, uint8_t *base, uint64_t committed, uint64_t at,
                      uint64_t size, uint64_t before)
{
	block *b = block_at(base, at);

	b->size_flags = size;
	b->before = before;
	return list_push(a, base, committed, at, size);
}

static void make_sentinel(uint8_t *base, uint64_t committed, uint64_t before)
{
	block *b = block_at(base, committed - UNIT);

	b->size_flags = UNIT | IN_USE;
	b->before = before;
}

void arena_init(shmq_arena_desc *a, uint8_t *base, uint64_t committed)
{
	arena_cursor cursor = {0, 0};

	arena_reset(a);
	arena_seal(a, base, committed, &cursor);
}

uint64_t arena_alloc(shmq_arena_desc *a, uint8_t *base, uint64_t committed, uint64_t length,
                     uint32_t *capacity)
{
	uint64_t size = arena_block_size(length), at = find(a, base, committed, size), whole;
	block *b;

	if (at == ARENA_FAILED || at == ARENA_BROKEN)
		return at;
	b = block_at(base, at);
	whole = size_in(base, committed, at);
	if (!TRUST_CHECK(whole >= size && !(b->size_flags & IN_USE)) ||
	    !list_remove(a, base, committed, at, whole))
		return ARENA_BROKEN;
	if (whole > size) {
		block_at(base, at + whole)->before = whole - size;
		if (!make_free(a, base, committed, at + size, whole - size, size))
			return ARENA_BROKEN;
		whole = size;
	}
	b->size_flags = whole | IN_USE;
	*capacity = (uint32_t)(whole - HEAD);
	return at + HEAD;
}

bool arena_owns(const uint8_t *base, uint64_t committed, uint64_t body, uint32_t capacity)
{
	uint64_t at = body - HEAD, size = (uint64_t)capacity + HEAD;

	return TRUST_CHECK(body >= HEAD && at % UNIT == 0 && size % UNIT == 0 &&
	                   at <= committed - UNIT && size <= committed - UNIT - at &&
	                   ((const block *)(const void *)(base + at))->size_flags == (size | IN_USE));
}

/* Free a block, and merge it with the free blocks beside it. */
static bool release(shmq_arena_desc *a, uint8_t *base, uint64_t committed, uint64_t at,
                    uint64_t size)
{
	uint64_t before, beside;

	if (!(block_at(base, at + size)->size_flags & IN_USE)) {
		beside = size_in(base, committed, at + size);
		if (!beside || !list_remove(a, base, committed, at + size, beside))
			return false;
		size += beside;
	}
	before = once(block_at(base, at)->before);
	if (!TRUST_CHECK(before <= at && before % UNIT == 0))
		return false;
	if (before && !(block_at(base, at - before)->size_flags & IN_USE)) {
		if (!TRUST_CHECK(block_size(block_at(base, at - before)) == before) ||
		    !list_remove(a, base, committed, at - before, before))
			return false;
		at -= before;
		size += before;
		before = block_at(base, at)->before;
	}
	block_at(base, at + size)->before = size;
	return make_free(a, base, committed, at, size, before);
}

bool arena_free(shmq_arena_desc *a, uint8_t *base, uint64_t committed, uint64_t body,
                uint32_t capacity)
{
	return arena_owns(base, committed, body, capacity) &&
	       release(a, base, committed, body - HEAD, (uint64_t)capacity + HEAD);
}

bool arena_extend(shmq_arena_desc *a, uint8_t *base, uint64_t old, uint64_t committed)
{
	block *b = block_at(base, old - UNIT); /* the old sentinel becomes a block and is freed */

	b->size_flags = (committed - old) | IN_USE;
	make_sentinel(base, committed, committed - old);
	return release(a, base, committed, old - UNIT, committed - old);
}

bool arena_claim(shmq_arena_desc *a, uint8_t *base, uint64_t committed, arena_cursor *cursor,
                 uint64_t body, uint32_t capacity)
{
	uint64_t at = body - HEAD, size = (uint64_t)capacity + HEAD;
	block *b;

	if (body < HEAD || at % UNIT || size % UNIT || at < cursor->at || size > committed - UNIT ||
	    at > committed - UNIT - size)
		return false;
	if (at > cursor->at) {
		(void)make_free(a, base, committed, cursor->at, at - cursor->at, cursor->before);
		cursor->before = at - cursor->at;
	}
	b = block_at(base, at);
	b->size_flags = size | IN_USE;
	b->before = cursor->before;
	cursor->at = at + size;
	cursor->before = size;
	return true;
}

void arena_seal(shmq_arena_desc *a, uint8_t *base, uint64_t committed, arena_cursor *cursor)
{
	uint64_t end = committed - UNIT;

	if (cursor->at < end) {
		(void)make_free(a, base, committed, cursor->at, end - cursor->at, cursor->before);
		cursor->before = end - cursor->at;
	}
	make_sentinel(base, committed, cursor->before);
}
