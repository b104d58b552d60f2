/*
 * The private handle of a results store, over the descriptors of layout.h.
 *
 * Locks: a store's lock is taken alone; nobody takes another lock under it.
 */
#ifndef SHMQ_STORE_HANDLE_H
#define SHMQ_STORE_HANDLE_H

#include "memory/handles.h"
#include "shmq_store.h"

struct shmq_store {
	shmq_broker *b;
	uint8_t *base;
	uint64_t size;
	shmq_store_desc *d;
	uint32_t *buckets;
	shmq_result_desc *entries;
	uint8_t *arena;
	uint32_t index;
	uint64_t serial;
	bool retired; /* this handle closed the segment, and goes on */
	/* The fixed words of the header, as they were when they were checked. */
	uint32_t max_keys, entries_max;
	uint64_t max_bytes, max_value, arena_max;
	uint64_t seed[2];
	/* How much is known to be backed by pages. Under the store's lock. */
	uint32_t entries_backed;
	uint64_t arena_backed;
};

/* A key with its hash. */
typedef struct store_key {
	const void *data;
	uint32_t length;
	uint64_t hash;
} store_key;

/* Where an entry was found. */
typedef struct store_place {
	uint32_t *link; /* the word that names it, or that a new entry of this key goes to */
	uint32_t entry; /* SHMQ_NONE: there is none */
} store_place;

/* The stripe of the waiters for a key with this hash. */
static inline uint32_t stripe_of(uint64_t hash)
{
	return (uint32_t)(hash >> 58);
}

#endif
