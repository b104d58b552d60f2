/*
 * What the core's files share: private handles over the shared descriptors, and the rules of
 * locking.
 *
 * Order of locks: registry, P (a topic's publish lock), D (a queue's deliver lock; several by queue
 * index). Nobody takes the registry under P, nor P under D. Every call that takes locks has `until`
 * (see shmq.h). A lock function that fails holds nothing.
 */
#ifndef SHMQ_INTERNAL_H
#define SHMQ_INTERNAL_H

#include "arena.h"
#include "atomics.h"
#include "clock.h"
#include "heap.h"
#include "killpoint.h"
#include "layout.h"
#include "lock.h"
#include "plant.h"
#include "sane.h"
#include "shmq.h"

/* A mapped queue segment. The broker's table holds one reference, handles hold more. */
typedef struct shmq_map {
	_Atomic uint32_t references;
	uint32_t index;
	uint64_t serial;
	uint64_t size;
	uint8_t *base;
	shmq_queue_desc *q;
	shmq_slot_desc *slots;
	uint32_t *ready, *defer, *requeue, *free;
	heap inflight, deferred;
	shmq_session_desc *sessions;
	shmq_lease_desc *leases;
	shmq_lessee_desc *lessees;
	shmq_latency_desc *latency;
	uint8_t *arena;
	/* Of the header, what is fixed when it is made; as it was when it was checked. */
	uint32_t topic, slots_max, mem_queue_size, inflight_slots, low_water;
	uint64_t arena_max;
	/* Behind how much there are pages, whatever the header says. */
	_Atomic uint32_t slots_backed, rings_backed, sessions_backed, leases_backed;
	_Atomic uint64_t arena_backed;
} shmq_map;

struct shmq_broker {
	uint8_t *base;
	uint64_t size;
	shmq_directory_desc *d;
	shmq_client_desc *clients;
	shmq_waiter_desc *waiters;
	shmq_request_desc *requests;
	shmq_topic_desc *topics;
	shmq_entry_desc *entries;
	_Atomic int64_t *next_deadline, *next_due;
	shmq_writer_desc *writers;
	_Atomic uint32_t clients_backed, topics_backed, queues_backed; /* as in shmq_map */
	uint32_t fork_generation;
	uint32_t client, client_generation;
	bool attached;
	uint32_t bell;             /* the supervisor's doorbell */
	pthread_mutex_t mutex;     /* this process's: maps, idle bells */
	uint32_t idle[SHMQ_WAITERS];
	uint32_t idle_count;
	_Atomic uint32_t references; /* handles opened on it, and itself */
	_Atomic(shmq_map *) maps[SHMQ_QUEUES];
};

#define CONSUMER_BELLS 8

struct shmq_consumer {
	shmq_broker *b;
	shmq_map *map;
	int64_t msg_timeout;   /* ns, INT64_MAX: never */
	uint32_t session;
	_Atomic uint32_t max_in_flight; /* 0: takes nothing */
	_Atomic bool closed;
	_Atomic uint32_t waiting[CONSUMER_BELLS]; /* of this process's threads that wait on it, + 1 */
};

/* status.c */
int because(int status, const char *format, ...) __attribute__((format(printf, 2, 3)));
void because_nothing(void);

/* segment.c */
int segment_map(int fd, uint64_t size, uint8_t **base);
void segment_unmap(uint8_t *base, uint64_t size);
/* Back [at, at + bytes) of a shared mapping with pages: SHMQ_NO_SPACE instead of a SIGBUS later. */
int segment_commit(uint8_t *base, uint64_t at, uint64_t bytes);
/* Give the whole pages of [from, to) back to the system; what is there reads as zeros. */
void segment_punch(uint8_t *base, uint64_t from, uint64_t to);
/* n entries of a table, or fewer if there can be no pages for so many; `backed` has how many are. */
uint32_t table_backed(uint8_t *base, const void *table, size_t entry, uint32_t n, uint32_t most,
                      _Atomic uint32_t *backed);
void segment_fill(shmq_segment_desc *s, enum shmq_segment_kind kind, uint64_t size, uint64_t serial,
                  const uint64_t instance[2]);
int segment_check(int fd, enum shmq_segment_kind kind, uint64_t *size);
/* SHMQ_CORRUPT if its tables cannot be as long as the directory says: behind what is known of them
 * there may be live entries. */
int directory_whole(shmq_broker *b);
int map_open(int fd, uint32_t index, uint64_t serial, const uint64_t instance[2], shmq_map **out);
void map_hold(shmq_map *map);
void map_release(shmq_map *map);
/* The same, and of a queue that was removed the broker's table lets go too. */
void map_put(shmq_broker *b, shmq_map *map);
uint64_t round_page(uint64_t bytes);
/* The same for the first n slots and what goes with them, the arena up to `end`, the two tables. */
int queue_commit_slots(shmq_map *map, uint32_t n);
int queue_commit_arena(shmq_map *map, uint64_t end);
/* From `have` on, whatever was known to have pages: they may have been given back since. */
int queue_grow_arena(shmq_map *map, uint64_t have, uint64_t end);
int queue_commit_leases(shmq_map *map);
/* n, or as many slots as there are pages for. */
uint32_t slots_back(shmq_map *map, uint32_t n);
/* Has a slot behind the first n ever been used? Only pages that are there are looked at. */
bool slots_behind(const shmq_map *map, uint32_t n);

/* broker.c */
extern _Atomic uint32_t fork_count;
bool usable(const shmq_broker *b);
int usable_status(const shmq_broker *b);
void broker_hold(shmq_broker *b);
void broker_release(shmq_broker *b);
/* A reference on the mapped queue, or SHMQ_NEED_MAP (noted for shmq_broker_missing), SHMQ_GONE. */
int map_get(shmq_broker *b, uint32_t index, shmq_map **out);
int map_get_serial(shmq_broker *b, uint32_t index, uint64_t serial, shmq_map **out);
void touch(shmq_broker *b, uint32_t index);

/* doorbell.c */
int bell_get(shmq_broker *b, uint32_t *bell);
void bell_put(shmq_broker *b, uint32_t bell);
/* Forget its rings: look at what they told after that. */
void bell_drain(shmq_broker *b, uint32_t bell);
/* Sleep on `bell`: 0 rung or the 1 s slice is over, SHMQ_TIMEOUT, SHMQ_INTERRUPTED. */
int bell_wait(shmq_broker *b, uint32_t bell, int64_t deadline, int64_t slice, bool *slept);
/* The same without a look at the doorbell before it. */
int bell_sleep(shmq_broker *b, uint32_t bell, int64_t deadline, int64_t slice);
/* How many messages a consumer found that slept: tells a stream from questions and answers. */
void bell_gathered(uint32_t messages);
void bell_ring(shmq_broker *b, uint32_t bell);
void wait_announce(shmq_waitset_desc *w, uint32_t bell);
void wait_withdraw(shmq_waitset_desc *w, uint32_t bell);
/* Wake up to n waiters, in rotation. Call after the store they wait for, with no lock needed. */
void wait_wake(shmq_broker *b, shmq_waitset_desc *w, uint32_t n);
void supervisor_ring(shmq_broker *b, uint32_t why);
/* The spiller is to look at a queue: note it (under any lock), ring. */
void attend(shmq_broker *b, uint32_t index);
void spiller_ring(shmq_broker *b, uint32_t index);
#define WAKE_ALL UINT32_MAX
#define RING_REQUEST 1u
#define RING_SPILLER 2u
#define RING_LEFT 4u
#define RING_CHANGED 8u
#define RING_DEADLINE 16u

/* directory.c */
int registry_lock(shmq_broker *b, int64_t until);
void registry_unlock(shmq_broker *b);
bool entry_is(const shmq_broker *b, uint32_t index, uint32_t topic);

/* recover.c */
int topic_lock(shmq_broker *b, shmq_topic_desc *t, int64_t until);
void topic_unlock(shmq_topic_desc *t);
/* D alone; what is dirty is repaired first (taking P and D). SHMQ_GONE if the queue was removed. */
int queue_lock(shmq_broker *b, shmq_map *map, int64_t until);
/* D while P of its topic is held. */
int queue_lock_under(shmq_broker *b, shmq_map *map, int64_t until);
/* P and D. */
int both_lock(shmq_broker *b, shmq_map *map, int64_t until);
void both_unlock(shmq_broker *b, shmq_map *map);
void queue_unlock(shmq_map *map);
/* P and D held (or the segment is not READY yet). SHMQ_CORRUPT: there is nothing to rebuild it from;
 * it stays dirty. */
int queue_rebuild(shmq_broker *b, shmq_map *map, bool adopting);
/* A closed queue, P and D held: pages of bodies that nobody can have any more go back. */
void queue_discard(shmq_map *map);
/* Both locks, or the one under which `map` was found to be garbage: the next locker of D repairs. */
static inline void queue_broken(shmq_map *map)
{
	st(&map->q->dirty, 1);
}
/* Garbage again behind a repair: somebody writes it. */
int queue_corrupt(const shmq_map *map);

/* What is read from a segment and used as an index, a count or an offset: never beyond what was
 * mapped and has pages, whatever is there. */
static inline uint32_t at_most(uint32_t value, uint32_t most)
{
	return SANE(value <= most) ? value : most;
}
static inline uint32_t slots_of(shmq_map *map)
{
	uint32_t n = ld(&map->q->slots_committed);

	return SANE(n <= ld(&map->slots_backed)) ? n : slots_back(map, n);
}
static inline uint32_t ring_mask_of(shmq_map *map)
{
	uint32_t mask = ld(&map->q->ring_mask);

	if (SANE(mask <= ld(&map->rings_backed)))
		return mask;
	(void)slots_of(map); /* they have grown */
	return at_most(mask, ld(&map->rings_backed));
}
static inline bool arena_back(shmq_map *map, uint64_t n)
{
	return n <= ld(&map->arena_backed) || (n <= map->arena_max && !queue_commit_arena(map, n));
}
/* Under P. Never so little that nothing could be compared with it. */
static inline uint64_t arena_of(shmq_map *map)
{
	uint64_t n = ld(&map->q->arena_committed);

	return SANE(n >= SHMQ_ARENA_UNIT && arena_back(map, n) && n % SHMQ_ARENA_UNIT == 0)
	               ? n
	               : SHMQ_ARENA_UNIT;
}
/* Can the words be true that say how much there is? All of one cache line. */
static inline bool words_are_sane(shmq_map *map)
{
	uint32_t n = ld(&map->q->slots_committed), mask = ld(&map->q->ring_mask);

	return SANE(n - 1 < slots_of(map) && n >= ld(&map->slots_backed) && n - 1 <= mask &&
	            mask <= ld(&map->rings_backed) && !(mask & (mask + 1)));
}
static inline uint32_t sessions_of(shmq_map *map)
{
	uint32_t n = ld(&map->q->sessions_committed);

	return SANE(n <= ld(&map->sessions_backed))
	               ? n
	               : table_backed(map->base, map->sessions, sizeof(*map->sessions), n,
	                              SHMQ_SESSIONS, &map->sessions_backed);
}
static inline uint32_t clients_of(shmq_broker *b)
{
	uint32_t n = ld_acquire(&b->d->clients_committed);

	return SANE(n <= ld(&b->clients_backed))
	               ? n
	               : table_backed(b->base, b->clients, sizeof(*b->clients), n, SHMQ_CLIENTS,
	                              &b->clients_backed);
}
static inline uint32_t topics_of(shmq_broker *b)
{
	uint32_t n = ld_acquire(&b->d->topics_committed);

	return SANE(n <= ld(&b->topics_backed))
	               ? n
	               : table_backed(b->base, b->topics, sizeof(*b->topics), n, SHMQ_TOPICS,
	                              &b->topics_backed);
}
static inline uint32_t queues_of(shmq_broker *b)
{
	uint32_t n = ld_acquire(&b->d->queues_committed);

	return SANE(n <= ld(&b->queues_backed))
	               ? n
	               : table_backed(b->base, b->entries, sizeof(*b->entries), n, SHMQ_QUEUES,
	                              &b->queues_backed);
}
static inline uint32_t waiters_of(const shmq_broker *b)
{
	return at_most(ld(&b->d->waiters_high), SHMQ_WAITERS);
}
/* Is it a slot, and in this state? Whatever a ring or heap names is. */
static inline bool slot_is(shmq_map *map, uint32_t slot, unsigned state)
{
	return SANE(slot < slots_of(map) && SHMQ_STATE_OF(ld(&map->slots[slot].word)) == state);
}
/* The slot that a cell of scratch space names, which was looked at before it was put there. */
static inline uint32_t slot_in(shmq_map *map, const uint32_t *cell)
{
	return at_most(once(*cell), slots_of(map) - 1);
}
/* The session that a slot names, NULL if there is none. */
static inline shmq_session_desc *session_of(shmq_map *map, const shmq_slot_desc *s)
{
	uint32_t i = once(s->session);

	return SANE(i < sessions_of(map)) ? &map->sessions[i] : NULL;
}
/* Messages that are used one after the other mostly lie so, slots and bodies. In a queue of many what
 * takes the time is to wait for each slot's lines, so those that come soon are asked for. */
#define AHEAD 12u
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
/* Where a slot's body is, as it was when it was checked: what is used after that is this copy. */
typedef struct span {
	uint64_t body;
	uint32_t length;
} span;
/* Does the slot's body lie where bodies are? */
static inline bool body_in(shmq_map *map, const shmq_slot_desc *s, span *at)
{
	uint32_t capacity = once(s->capacity);
	uint64_t end;

	at->body = once(s->body);
	at->length = once(s->length);
	end = at->body + capacity;
	return SANE(at->body <= map->arena_max && at->length <= capacity &&
	            capacity <= UINT32_MAX - 2 * SHMQ_ARENA_UNIT &&
	            (end <= ld(&map->arena_backed) ||
	             (end <= ld_acquire(&map->q->arena_committed) && arena_back(map, end))));
}
static inline bool body_is_in(shmq_map *map, const shmq_slot_desc *s)
{
	span at;

	return body_in(map, s, &at);
}

/* queue.c: all under D unless said otherwise */
static inline shmq_topic_desc *topic_of(const shmq_broker *b, const shmq_map *map)
{
	return &b->topics[map->topic];
}
static inline uint32_t ring_count(_Atomic uint32_t *head, _Atomic uint32_t *tail)
{
	return ld_acquire(tail) - ld_acquire(head);
}
static inline uint32_t ready_budget(const shmq_map *map)
{
	return map->mem_queue_size > SHMQ_TRANSIT ? map->mem_queue_size : SHMQ_TRANSIT;
}
static inline uint64_t bytes_budget(const shmq_map *map)
{
	return map->arena_max / 4 * 3;
}
/* What is held must leave room for the spill. */
static inline bool may_hold_more(const shmq_map *map)
{
	shmq_queue_desc *q = map->q;

	return ld(&q->held) < map->inflight_slots &&
	       (!ld(&q->held) || ld(&q->held_bytes) <= bytes_budget(map));
}
/* Can the counts that decide whether there is room be true? */
static inline bool counts_are_sane(shmq_map *map)
{
	shmq_queue_desc *q = map->q;
	uint32_t n = slots_of(map);

	return SANE(ring_count(&q->ready_head, &q->ready_tail) <= n && ld(&q->held) <= n &&
	            ld(&q->leased) <= n &&
	            ld(&q->spilling_count) <= n && ld(&q->spilling) <= 1 &&
	            ld(&q->held_bytes) <= map->arena_max + (uint64_t)n * SHMQ_ARENA_HEAD);
}
/* One message of a session less in flight. */
static inline void session_leave(shmq_session_desc *s)
{
	if (ld(&s->in_flight))
		st(&s->in_flight, ld(&s->in_flight) - 1);
}
static inline uint64_t block_bytes(const shmq_slot_desc *s)
{
	return (uint64_t)s->capacity + SHMQ_ARENA_HEAD;
}
static inline bool on_disk(shmq_queue_desc *q)
{
	return ld(&q->disk_read) != ld(&q->disk_write) || ld(&q->spilling);
}
/* Deferred messages are to make room: they take half of what may be held, or too many bytes. */
static inline bool defers_many(const shmq_map *map)
{
	shmq_queue_desc *q = map->q;
	uint32_t deferred = ld(&q->deferred_len) + ring_count(&q->defer_head, &q->defer_tail);

	return deferred && (deferred > map->inflight_slots / 2 ||
	                    ld(&q->held_bytes) > map->arena_max / 8 * 5);
}
static inline uint64_t word_next(uint64_t word, unsigned state)
{
	return SHMQ_WORD(state, 0, SHMQ_GENERATION_OF(word));
}
/* What a slot is again that was SPILLING or MOVING and is not to go. */
static inline unsigned previous_of(const shmq_slot_desc *s)
{
	return s->previous == SHMQ_READY || s->previous == SHMQ_DEFERRED ? s->previous : SHMQ_BACK;
}
bool queue_is_empty(shmq_queue_desc *q);
/* Without D: is there something to take, or to be told (closed, gone, dirty)? */
bool may_take(shmq_consumer *c);
/* This process's bell among those that shmq_consumer_wake rings; false: there is no place left. */
bool consumer_enter(shmq_consumer *c, uint32_t bell);
void consumer_leave(shmq_consumer *c, uint32_t bell);
/* FREE and into the free ring, or DONE while pinned. The slot is in no ring and no heap. */
void slot_release(shmq_map *map, uint32_t slot);
/* BACK, behind the requeue ring. `after`: seq it waits for, 0: may go first. */
void slot_back(shmq_map *map, uint32_t slot, uint64_t after);
/* `requeue_firsts` anew, when entries were moved. */
void requeue_firsts_find(shmq_map *map);
/* What a take would hand out next and the head that then moves on by one; false: nothing. */
bool queue_next(shmq_map *map, uint32_t *slot, _Atomic uint32_t **head, span *at);
void held_add(shmq_map *map, uint32_t slot);
void held_remove(shmq_map *map, uint32_t slot);
void defer_drain(shmq_broker *b, shmq_map *map);
void deadline_note(shmq_broker *b, shmq_map *map);
void due_note(shmq_broker *b, uint32_t index, int64_t due);
/* After a queue's next deadline or due time became earlier. */
void scanner_ring(shmq_broker *b, int64_t deadline, int64_t due);
void wake_takers(shmq_broker *b, shmq_map *map, uint32_t n);
void wake_space(shmq_broker *b, shmq_map *map);
/* Without D: ring if little is left in front of what is on disk (or there is room for it only now), or
 * deferred messages have become too many. wake_space does it too. */
void spiller_tell(shmq_broker *b, shmq_map *map);
/* Give back everything `client` holds of this queue (D held). */
uint32_t queue_return(shmq_broker *b, shmq_map *map, uint32_t client, uint32_t session);
/* READY by seq; BACK by the order of return. */
int by_order(const shmq_slot_desc *x, const shmq_slot_desc *y);
/* INFLIGHT */
int by_delivery(const shmq_slot_desc *x, const shmq_slot_desc *y);
void sort_slots(uint32_t *ring, uint32_t mask, uint32_t base, uint32_t n, const shmq_slot_desc *slots,
                int (*order)(const shmq_slot_desc *, const shmq_slot_desc *));

/* lease.c, under D */
/* What a rebuild makes of a LEASED slot: its next state, with its fields set for it. */
unsigned lease_resolve(shmq_map *map, shmq_slot_desc *s);
/* After every slot was resolved: entries that were decided are free again. */
void lease_resolved(shmq_map *map);
/* When something about leases is to be done next, CLOCK_MONOTONIC ns; INT64_MAX: never. */
int64_t lease_deadline(shmq_map *map);
/* Leases whose time is over go back, those that are finished are freed. */
void lease_expire(shmq_map *map, int64_t now, uint32_t limit, uint32_t *returned);
/* The client is gone: what it held under a name waits for its next incarnation. */
void lease_orphan(shmq_broker *b, shmq_map *map, uint32_t client);
void lease_return_all(shmq_map *map);
/* Is what lies at the read position leased? Then it does not move. */
bool lease_has_run(shmq_map *map);
/* spill.c, under D: if nothing is on disk any more, what is READY may be taken again. */
bool disk_is_empty(shmq_queue_desc *q);

/* writer.c, under P of the topic */
/* Its writers, after a death: what was not committed is forgotten. */
void writer_recover(shmq_broker *b, uint32_t topic);
/* The entry to be marked and, with `fresh`, made; SHMQ_REPEATED: those messages are published. */
int writer_begin(shmq_broker *b, uint32_t topic, const shmq_mark *mark, shmq_writer_desc **out);
void writer_prepare(shmq_writer_desc *w, const shmq_mark *mark, uint64_t seq);
void writer_commit(shmq_writer_desc *w);

/* latency.c, under D: a message published at `timestamp` was finished at `now` (CLOCK_REALTIME) */
void latency_record(shmq_latency_desc *l, int64_t timestamp, int64_t now);
void latency_turn(shmq_latency_desc *l, int64_t now);

/* spill.c */
/* As many of the n as the budget and the arena have room for, or SHMQ_EMPTY. P held. */
int restore_room(shmq_broker *b, shmq_map *map, const uint64_t *lengths, uint32_t *n,
                 int64_t until);

/* topic.c: under P */
/* For a restore: make sure that the next n free slots exist and have bodies for `lengths`: 0,
 * SHMQ_FULL, SHMQ_TOO_BIG, SHMQ_AGAIN. Moves no head; may take D to grow. */
int queue_room(shmq_broker *b, shmq_map *map, const uint64_t *lengths, uint32_t n, int64_t until);
static inline uint32_t free_slot(shmq_map *map, uint32_t ahead)
{
	return map->free[(ld(&map->q->free_head) + ahead) & ring_mask_of(map)];
}
/* That slot if it is FREE and owns a block for so long a body, else NULL; the body. */
static inline shmq_slot_desc *free_slot_for(shmq_map *map, uint32_t ahead, uint64_t length,
                                            uint8_t **to)
{
	uint32_t slot = free_slot(map, ahead), capacity;
	shmq_slot_desc *s = &map->slots[slot];
	uint64_t body;

	if (!slot_is(map, slot, SHMQ_FREE))
		return NULL;
	capacity = once(s->capacity);
	body = once(s->body);
	*to = map->arena + body;
	return capacity >= length && arena_owns(map->arena, arena_of(map), body, capacity) ? s : NULL;
}

/* record.c */
#define RECORD_HEAD 30u /* 4 length, 8 timestamp, 2 attempts, 16 id */
typedef struct record {
	const uint8_t *body;
	uint64_t length;
	int64_t timestamp;
	uint64_t id;
	uint16_t attempts;
} record;
void record_write(uint8_t *to, const shmq_slot_desc *slot, const uint8_t *body);
/* Into a slot whose body is long enough; its state, order and position are the caller's. */
void record_place(shmq_slot_desc *slot, uint8_t *body, const record *from);
/* 1: whole; 0: not, *size is what it would be (if as much as that is there); -1: cannot be right. */
int record_size(const uint8_t *from, uint64_t length, uint64_t max_msg_size, uint64_t *size);
/* 1: read, *used says how long it was; 0: not whole; -1: cannot be right. */
int record_read(const uint8_t *from, uint64_t length, uint64_t max_msg_size, record *out,
                uint64_t *used);

/* chunk.c */
int chunk_end(shmq_broker *b, const shmq_spill *s, bool ok, int64_t until);

#endif
