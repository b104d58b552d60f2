/* Every byte of a results store. layout.h includes this file at its end. */
#ifndef SHMQ_LAYOUT_STORE_H
#define SHMQ_LAYOUT_STORE_H

#include "memory/layout.h"

#define SHMQ_STORE_STRIPES 64u /* a store's waiters, by the hash of the key that they wait for */

/* A results store's entry. Under the registry lock; `state` is stored last. */
typedef struct shmq_store_entry_desc {
	_Atomic uint32_t state;      /* FREE or LIVE */
	_Atomic uint32_t generation; /* raised by every delete */
	uint64_t serial;
	uint64_t max_bytes;
	uint32_t max_keys;
	uint32_t flags;
	char name[SHMQ_NAME];
	uint64_t reserved[2];
} shmq_store_entry_desc;
_Static_assert(sizeof(shmq_store_entry_desc) == 128, "store entry");

/* One key with its value. Under the store's lock, which every reader takes too. `word` is the
 * truth: a death between two stores of it leaves the old value or the new one. If two entries have
 * one key, the greater word counts (a set died before it freed the old entry). */
typedef struct shmq_result_desc {
	_Atomic uint64_t word; /* 0: free; else the number of the set that stored it. Stored last */
	uint64_t hash;         /* of the key */
	uint64_t body;         /* offset in the arena: the key, right after it the value */
	int64_t expires;       /* CLOCK_MONOTONIC ns; INT64_MAX: never */
	uint32_t capacity;     /* bytes of its arena block */
	uint32_t length;       /* of the value */
	uint32_t next;         /* derived: the next entry of its bucket or of the free list */
	uint16_t key_length;
	uint16_t reserved0;
	uint64_t reserved[2];
} shmq_result_desc;
_Static_assert(sizeof(shmq_result_desc) == 64, "result");

/* The waiters for the keys of one part of all hashes. */
typedef struct shmq_stripe_desc {
	shmq_waitset_desc waiters;
	_Atomic uint32_t stored; /* raised by each set of such a key; a waiter compares it */
	uint32_t reserved0;
	uint64_t reserved[7];
} shmq_stripe_desc;
_Static_assert(sizeof(shmq_stripe_desc) == 256, "stripe");

typedef struct shmq_store_desc {
	shmq_segment_desc segment;
	/* 128: fixed at creation */
	uint32_t index;
	uint32_t max_keys;
	uint32_t entries_max; /* one more than max_keys: a set has its own entry before it frees one */
	uint32_t flags;
	uint64_t max_bytes; /* of arena blocks in use */
	uint64_t max_value; /* bytes */
	uint64_t arena_max;
	uint64_t buckets_at, entries_at, arena_at;
	uint64_t seed[2]; /* of the hash, random */
	char name[SHMQ_NAME];
	uint64_t reserved0[12];
	/* 384 */
	shmq_lock_desc lock;
	/* 448: under the lock. Pages exist for entries_committed entries and for the buckets of as many,
	 * rounded up to a power of two. */
	_Atomic uint32_t dirty; /* derived state may be wrong: rebuild it */
	_Atomic uint32_t entries_committed;
	_Atomic uint64_t arena_committed;
	_Atomic uint64_t sequence; /* the last number given to a set; derived, never lowered */
	/* derived */
	uint32_t free; /* first entry of the free list; SHMQ_NONE */
	_Atomic uint32_t keys;
	_Atomic uint64_t bytes; /* of arena blocks in use */
	/* No key expires before it. CLOCK_MONOTONIC ns; INT64_MAX: none expires. */
	_Atomic int64_t next_expiry;
	int64_t sweep_earliest; /* of the keys that the sweep has passed, and those stored since */
	uint32_t sweep_at;      /* the sweep's next entry; 0: none is under way */
	uint32_t reserved1;
	/* counters */
	_Atomic uint64_t stored;
	_Atomic uint64_t removed;
	_Atomic uint64_t expired;
	_Atomic uint64_t refused; /* for want of room */
	uint64_t reserved2[444];
	shmq_arena_desc arena; /* 4096 */
	shmq_stripe_desc stripes[SHMQ_STORE_STRIPES];
} shmq_store_desc;
_Static_assert(offsetof(shmq_store_desc, lock) == 384, "store: lock");
_Static_assert(offsetof(shmq_store_desc, arena) == 4096, "store: arena");
_Static_assert(sizeof(shmq_store_desc) == 24576, "store");

#endif
