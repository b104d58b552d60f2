/* Mapped segments, and bounds for every index, count or offset that is read from one. */
#ifndef SHMQ_SEGMENT_H
#define SHMQ_SEGMENT_H

#include "base/atomics.h"
#include "base/bounds.h"
#include "memory/handles.h"
#include "memory/properties.h"

/* Consecutive messages usually occupy consecutive slots and bodies. In a large queue the cost is
 * one cache miss per slot, so the slot AHEAD positions further on is prefetched. */
#define AHEAD 12u

/* Where a slot's body is, copied when it was checked; only this copy is used afterwards. */
typedef struct span {
	uint64_t body;       /* offset in the arena */
	uint32_t length;     /* of the body */
	uint32_t properties; /* bytes of properties right before it */
	bool sealed;
} span;

typedef struct directory_plan {
	uint64_t clients, waiters, requests, topics, queues, deadline, due, writers, stores, size,
			first;
} directory_plan;

typedef struct queue_plan {
	uint64_t slots, ready, defer, requeue, free, in_flight_when, in_flight_slot, deferred_when,
			deferred_slot, sessions, leases, lease_holders, latency, arena, size;
	uint32_t slots_max;
} queue_plan;

uint64_t round_page(uint64_t bytes);
/* Give a new object its size. SHMQ_NO_MEMORY: RLIMIT_FSIZE forbids it; SHMQ_NO_SPACE. */
int segment_size(int fd, uint64_t size, const char *what);
int segment_map(int fd, uint64_t size, uint8_t **base);
void segment_unmap(uint8_t *base, uint64_t size);
/* Bytes that the file system of shared memory has in all, if `bytes` are more than that; otherwise
 * 0. A body that is larger can never be stored, and to try would fill it. */
uint64_t shared_memory_below(uint64_t bytes);
/* Back [at, at + bytes) of a shared mapping with pages: SHMQ_NO_SPACE instead of a SIGBUS later. */
int segment_commit(uint8_t *base, uint64_t at, uint64_t bytes);
/* Give the whole pages of [from, to) back to the system; the range then reads as zeros. */
void segment_punch(uint8_t *base, uint64_t from, uint64_t to);
/* Back n entries of a table with pages. Returns n, or fewer if there are not enough pages; `backed`
 * holds how many are known to be backed. */
uint32_t table_backed(uint8_t *base, const void *table, size_t entry, uint32_t n, uint32_t most,
                      _Atomic uint32_t *backed);
int segment_check(int fd, enum shmq_segment_kind kind, uint64_t *size);
directory_plan plan_directory(void);
/* The number of messages that keeps consumers busy until the next read, also with a small
 * budget. */
uint32_t low_water_of(const shmq_map *map);
uint32_t power_of_two(uint32_t n);
queue_plan plan_queue(uint32_t mem_queue_size, uint32_t in_flight_slots, uint64_t arena_max);
/* Back with pages the first n slots with their ring and heap entries; the arena up to `end`; the
 * lease tables. */
int queue_commit_slots(shmq_map *map, uint32_t n);
/* Have the pages for that, and note nothing: a commit afterwards only looks whether they exist. */
int queue_ready_slots(const shmq_map *map, uint32_t n);
/* Back the first n slots. Returns n, or the number of slots that have pages. */
uint32_t slots_back(shmq_map *map, uint32_t n);
/* Returns true if a slot after the first n was ever used. Looks only at pages that exist. */
bool slots_behind(const shmq_map *map, uint32_t n);
int queue_commit_arena(shmq_map *map, uint64_t end);
/* Have the pages of the arena up to `end`, and at the same time those up to `committed` (a word of
 * shared memory), so that a mapping asks once for each growth of the arena and not for each body.
 * Returns false if those up to `end` cannot be had. */
bool arena_follow(shmq_map *map, uint64_t end, uint64_t committed);
/* Back the arena with pages from `have` to `end`, also where it was backed before: those pages may
 * have been given back since. */
int queue_grow_arena(shmq_map *map, uint64_t have, uint64_t end);
int queue_commit_leases(shmq_map *map);

/* Have the queue repaired by the next locker of D. Call it with both locks, or with the one
 * under which the garbage was found. */
static inline void queue_broken(shmq_map *map)
{
	st(&map->q->dirty, 1);
}

/* Bound a value that was read from a segment and is used as an index, a count or an offset: it
 * never goes beyond what is mapped and has pages, whatever the segment says. */
static inline uint32_t at_most(uint32_t value, uint32_t most)
{
	return TRUST_CHECK(value <= most) ? value : most;
}

static inline uint32_t slots_of(shmq_map *map)
{
	uint32_t n = ld(&map->q->slots_committed);

	return TRUST_CHECK(n <= ld(&map->slots_backed)) ? n : slots_back(map, n);
}

static inline uint32_t ring_mask_of(shmq_map *map)
{
	uint32_t mask = ld(&map->q->ring_mask);

	if (TRUST_CHECK(mask <= ld(&map->rings_backed)))
		return mask;
	(void)slots_of(map); /* the rings have grown */
	return at_most(mask, ld(&map->rings_backed));
}

static inline bool arena_back(shmq_map *map, uint64_t n)
{
	return n <= ld(&map->arena_backed) || (n <= map->arena_max && !queue_commit_arena(map, n));
}

/* The committed size of the arena, at least one unit. Under P. */
static inline uint64_t arena_of(shmq_map *map)
{
	uint64_t n = ld(&map->q->arena_committed);

	return TRUST_CHECK(n >= SHMQ_ARENA_UNIT && arena_back(map, n) && n % SHMQ_ARENA_UNIT == 0)
				   ? n
				   : SHMQ_ARENA_UNIT;
}

/* Returns true if the words that say how much is committed can be true. They share one cache
 * line. */
static inline bool words_are_sane(shmq_map *map)
{
	uint32_t n = ld(&map->q->slots_committed), mask = ld(&map->q->ring_mask);

	return TRUST_CHECK(n - 1 < slots_of(map) && n >= ld(&map->slots_backed) && n - 1 <= mask &&
	                   mask <= ld(&map->rings_backed) && !(mask & (mask + 1)));
}

static inline uint32_t sessions_of(shmq_map *map)
{
	uint32_t n = ld(&map->q->sessions_committed);

	return TRUST_CHECK(n <= ld(&map->sessions_backed))
				   ? n
				   : table_backed(map->base, map->sessions, sizeof(*map->sessions), n,
				                  SHMQ_SESSIONS, &map->sessions_backed);
}

static inline uint32_t clients_of(shmq_broker *b)
{
	uint32_t n = ld_acquire(&b->d->clients_committed); /* SYNC(clients-committed) */

	return TRUST_CHECK(n <= ld(&b->clients_backed))
				   ? n
				   : table_backed(b->base, b->clients, sizeof(*b->clients), n, SHMQ_CLIENTS,
				                  &b->clients_backed);
}

static inline uint32_t topics_of(shmq_broker *b)
{
	uint32_t n = ld_acquire(&b->d->topics_committed); /* SYNC(topics-committed) */

	return TRUST_CHECK(n <= ld(&b->topics_backed))
				   ? n
				   : table_backed(b->base, b->topics, sizeof(*b->topics), n, SHMQ_TOPICS,
				                  &b->topics_backed);
}

static inline uint32_t queues_of(shmq_broker *b)
{
	uint32_t n = ld_acquire(&b->d->queues_committed); /* SYNC(queues-committed) */

	return TRUST_CHECK(n <= ld(&b->queues_backed))
				   ? n
				   : table_backed(b->base, b->entries, sizeof(*b->entries), n, SHMQ_QUEUES,
				                  &b->queues_backed);
}

static inline uint32_t waiters_of(const shmq_broker *b)
{
	return at_most(ld(&b->d->waiters_high), SHMQ_WAITERS);
}

/* Returns true if this index is a slot in this state, as each index in a ring or heap must be. */
static inline bool slot_is(shmq_map *map, uint32_t slot, unsigned state)
{
	return TRUST_CHECK(slot < slots_of(map) && SHMQ_STATE_OF(ld(&map->slots[slot].word)) == state);
}

/* The slot that a cell of scratch space names. It was checked before it was put there. */
static inline uint32_t slot_in(shmq_map *map, const uint32_t *cell)
{
	return at_most(once(*cell), slots_of(map) - 1);
}

/* The session that a slot names, or NULL if there is none. */
static inline shmq_session_desc *session_of(shmq_map *map, const shmq_slot_desc *s)
{
	uint32_t i = once(s->session);

	return TRUST_CHECK(i < sessions_of(map)) ? &map->sessions[i] : NULL;
}

static inline void slots_ahead(const shmq_map *map, uint32_t slot)
{
	const shmq_slot_desc *s = &map->slots[slot + AHEAD];

	prefetch(s);
	prefetch(&s->after);
}

static inline void bodies_ahead(const shmq_map *map, const shmq_slot_desc *s)
{
	const uint8_t *body = map->arena + s->body + AHEAD * ((uint64_t)s->capacity + SHMQ_ARENA_HEAD);

	prefetch(body - SHMQ_ARENA_HEAD);
	prefetch(body + 64 - SHMQ_ARENA_HEAD);
}

/* Move the span's beginning behind the properties of its slot. Returns false if they cannot be
 * there. */
static inline bool span_separate(const shmq_slot_desc *s, span *at)
{
	at->properties = 0;
	at->sealed = false;
	if (__builtin_expect(once(s->flags) & SHMQ_SLOT_PROPERTIES, 0)) {
		uint32_t properties = once(s->properties);

		if (!TRUST_CHECK(properties_can_be(SHMQ_SLOT_PROPERTIES, properties, at->length)))
			return false;
		at->sealed = properties & SHMQ_SLOT_SEALED;
		properties &= ~SHMQ_SLOT_SEALED;
		at->body += properties;
		at->length -= properties;
		at->properties = properties;
	}
	return true;
}

/* Find a slot's body. Returns false if it does not lie inside the arena. */
static inline bool body_in(shmq_map *map, const shmq_slot_desc *s, span *at)
{
	uint32_t capacity = once(s->capacity);
	uint64_t end;

	at->body = once(s->body);
	at->length = once(s->length);
	end = at->body + capacity;
	return TRUST_CHECK(at->body <= map->arena_max && at->length <= capacity &&
	                   capacity <= UINT32_MAX - 2 * SHMQ_ARENA_UNIT &&
	                   (end <= ld(&map->arena_backed) ||
	                    /* SYNC(arena-committed) */
	                    arena_follow(map, end, ld_acquire(&map->q->arena_committed)))) &&
	       span_separate(s, at);
}

static inline bool body_is_in(shmq_map *map, const shmq_slot_desc *s)
{
	span at;

	return body_in(map, s, &at);
}

static inline uint32_t ready_budget(const shmq_map *map)
{
	return map->mem_queue_size > SHMQ_TRANSIT ? map->mem_queue_size : SHMQ_TRANSIT;
}

#endif
