#include "queue/sort.h"

#include "base/atomics.h"
#include "base/bounds.h"
#include "memory/segment.h"

#define DIGIT_BITS 8u
#define DIGITS (1u << DIGIT_BITS)
#define FEW 32u /* sorted by insertion */

/* Entry i of the sort is ring[(base + i) & mask], its key is keys[i]. */
typedef struct sorting {
	uint32_t *ring, mask, base;
	uint64_t *keys, least;
} sorting;

static uint32_t *entry(const sorting *s, uint32_t i)
{
	return &s->ring[(s->base + i) & s->mask];
}

static void put(const sorting *s, uint32_t i, uint64_t key, uint32_t slot)
{
	s->keys[i] = key;
	*entry(s, i) = slot;
}

static void swap(const sorting *s, uint32_t i, uint32_t j)
{
	uint64_t key = s->keys[i];
	uint32_t slot = *entry(s, i);

	put(s, i, s->keys[j], *entry(s, j));
	put(s, j, key, slot);
}

static void insertion(const sorting *s, uint32_t from, uint32_t to)
{
	for (uint32_t i = from + 1; i < to; i++) {
		uint64_t key = s->keys[i];
		uint32_t slot = *entry(s, i), at = i;

		for (; at > from && s->keys[at - 1] > key; at--)
			put(s, at, s->keys[at - 1], *entry(s, at - 1));
		put(s, at, key, slot);
	}
}

static unsigned digit_of(const sorting *s, uint32_t i, unsigned shift)
{
	return (unsigned)((once(s->keys[i]) - s->least) >> shift) % DIGITS;
}

/* Sort the entries [from, to) by the digit of their keys at bit `shift`, and each part with the same
 * digit by those below: 8 levels at most. If some process overwrites a key between the count and
 * the swaps, a part overflows; the sort then ends, as the order is garbage anyway. */
static void radix(const sorting *s, uint32_t from, uint32_t to, unsigned shift)
{
	uint32_t at[DIGITS] = {0}, end[DIGITS], sum = from;

	for (uint32_t i = from; i < to; i++)
		at[digit_of(s, i, shift)]++;
	for (unsigned d = 0; d < DIGITS; d++) {
		uint32_t count = at[d];

		at[d] = sum;
		end[d] = sum += count;
	}
	for (unsigned d = 0; d < DIGITS; d++)
		while (at[d] < end[d]) {
			unsigned its = digit_of(s, at[d], shift);

			if (its == d)
				at[d]++;
			else if (at[its] < end[its])
				swap(s, at[d], at[its]++);
			else
				return;
		}
	for (unsigned d = 0; shift && d < DIGITS; from = end[d++])
		if (end[d] - from > FEW)
			radix(s, from, end[d], shift > DIGIT_BITS ? shift - DIGIT_BITS : 0);
		else
			insertion(s, from, end[d]);
}

void sort_slots(shmq_map *map, uint32_t *ring, uint32_t base, uint32_t n, slot_key key,
                const heap *beside)
{
	uint32_t slots = slots_of(map), used = ld(beside->length);
	sorting s = {ring, ring_mask_of(map), base, (uint64_t *)beside->when + used, UINT64_MAX};
	uint64_t last = 0, most = 0;
	bool sorted = true;

	if (!TRUST_CHECK(used <= slots && n <= slots - used)) {
		queue_broken(map);
		return;
	}
	for (uint32_t i = 0; i < n; i++) {
		uint64_t its = key(&map->slots[at_most(once(*entry(&s, i)), slots - 1)]);

		sorted &= its >= last;
		last = s.keys[i] = its;
		s.least = its < s.least ? its : s.least;
		most = its > most ? its : most;
	}
	if (!sorted) {
		unsigned bits = 64 - (unsigned)__builtin_clzll(most - s.least);

		radix(&s, 0, n, bits > DIGIT_BITS ? bits - DIGIT_BITS : 0);
	}
}
