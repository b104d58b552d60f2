/* A results store, recounted from its bytes: every key is once in its bucket, every free entry once in
 * the free list, every block is owned or free, and the counts add up. */
#ifndef CHECKER_STORE_H
#define CHECKER_STORE_H

#include "memory/layout.h"

#include <stdbool.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char checker_store_says[200];

#define STORE_WRONG(...)                                                                           \
	do {                                                                                           \
		snprintf(checker_store_says, sizeof(checker_store_says), __VA_ARGS__);                     \
		return checker_store_says;                                                                 \
	} while (0)

/* The blocks of the arena, one after the other: each belongs to an entry or is free. */
static inline const char *checker_store_arena(const shmq_store_desc *d, const uint8_t *base)
{
	const shmq_result_desc *entries = (const void *)(base + d->entries_at);
	const uint8_t *arena = base + d->arena_at;
	uint64_t end = d->arena_committed - SHMQ_ARENA_UNIT, before = 0, free_bytes = 0;
	bool was_free = false;

	for (uint64_t at = 0; at < end;) {
		const uint64_t *head = (const void *)(arena + at);
		uint64_t size = head[0] & ~(uint64_t)63, owners = 0;

		if (!size || size > end - at || head[1] != before)
			STORE_WRONG("the block at %llu has impossible tags", (unsigned long long)at);
		for (uint32_t i = 0; i < d->entries_committed; i++)
			if (entries[i].word && entries[i].body == at + SHMQ_ARENA_HEAD)
				owners += entries[i].capacity + SHMQ_ARENA_HEAD == size ? 1 : 2;
		if (owners != (head[0] & 1))
			STORE_WRONG("the block at %llu has %llu owners", (unsigned long long)at,
			            (unsigned long long)owners);
		if (!owners && was_free)
			STORE_WRONG("two free blocks are beside each other");
		was_free = !owners;
		free_bytes += owners ? 0 : size;
		before = size;
		at += size;
	}
	if (free_bytes != d->arena.free_bytes)
		STORE_WRONG("the arena has %llu free bytes and says %llu", (unsigned long long)free_bytes,
		            (unsigned long long)d->arena.free_bytes);
	return "";
}

static inline const char *checker_store(const void *segment)
{
	const shmq_store_desc *d = segment;
	const uint8_t *base = segment;
	const shmq_result_desc *entries = (const void *)(base + d->entries_at);
	const uint32_t *buckets = (const void *)(base + d->buckets_at);
	uint32_t n = d->entries_committed, mask = 0, keys = 0, listed = 0, idle = 0;
	uint64_t bytes = 0;

	if (d->dirty)
		STORE_WRONG("it is dirty");
	while (mask < n - 1)
		mask = 2 * mask + 1;
	for (uint32_t i = 0; i < n; i++) {
		if (!entries[i].word)
			continue;
		keys++;
		bytes += entries[i].capacity + SHMQ_ARENA_HEAD;
		if (entries[i].word > d->sequence)
			STORE_WRONG("entry %u has a number that was not given", i);
		if (entries[i].expires < d->next_expiry)
			STORE_WRONG("entry %u expires before the bound", i);
		for (uint32_t k = 0; k < i; k++)
			if (entries[k].word && entries[k].key_length == entries[i].key_length &&
			    !memcmp(base + d->arena_at + entries[k].body, base + d->arena_at + entries[i].body,
			            entries[i].key_length))
				STORE_WRONG("a key is there twice: %u, %u", k, i);
	}
	for (uint32_t b = 0; b <= mask; b++)
		for (uint32_t at = buckets[b]; at != SHMQ_NONE; at = entries[at].next, listed++)
			if (at >= n || !entries[at].word || (entries[at].hash & mask) != b || listed > n)
				STORE_WRONG("bucket %u lists entry %u", b, at);
	for (uint32_t at = d->free; at != SHMQ_NONE; at = entries[at].next, idle++)
		if (at >= n || entries[at].word || idle > n)
			STORE_WRONG("the free list has entry %u", at);
	if (keys != listed || keys != d->keys || keys + idle != n || bytes != d->bytes)
		STORE_WRONG("%u keys, %u in buckets, says %u; %u free of %u; %llu bytes, says %llu", keys,
		            listed, d->keys, idle, n, (unsigned long long)bytes,
		            (unsigned long long)d->bytes);
	return checker_store_arena(d, base);
}

#endif
