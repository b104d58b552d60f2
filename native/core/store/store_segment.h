/* The segment of a results store, and its lock. */
#ifndef SHMQ_STORE_SEGMENT_H
#define SHMQ_STORE_SEGMENT_H

#include "memory/store_handle.h"

typedef struct store_plan {
	uint64_t buckets, entries, arena, arena_max, size;
	uint32_t entries_max;
} store_plan;

store_plan plan_store(uint32_t max_keys, uint64_t max_bytes, uint64_t max_value);
/* Take the store's lock, and repair the store if its last holder died. */
int store_lock(shmq_store *s, int64_t until);
void store_unlock(shmq_store *s);
/* Wake those who wait for keys of this stripe; of all. Not under the lock. */
void store_wake(shmq_store *s, uint32_t stripe);
void store_wake_all(shmq_store *s);

#endif
