/* Moves of one slot. All under the deliver lock (D) unless said otherwise. */
#ifndef SHMQ_SLOTS_H
#define SHMQ_SLOTS_H

#include "base/atomics.h"
#include "base/bounds.h"
#include "memory/arena.h"
#include "memory/handles.h"
#include "memory/segment.h"
#include "queue/settings.h"

bool entry_is(const shmq_broker *b, uint32_t index, uint32_t topic);
bool queue_is_empty(shmq_queue_desc *q);
void in_use_add(shmq_map *map, uint32_t slot);
void in_use_remove(shmq_map *map, uint32_t slot);
void free_push(shmq_map *map, uint32_t slot);
/* Make a slot, which is in no ring and no heap, FREE and add it to the free ring; or PINNED while a
 * view pins it. */
void slot_release(shmq_map *map, uint32_t slot);
/* The word of a client's log that says: a view of it pins this slot. Of the queue's serial it has the
 * low 40 bits; the lowest 32 count the serials of an instance, so they name one queue. */
static inline uint64_t pin_of(uint64_t serial, uint32_t slot)
{
	return serial << 24 | slot;
}

/* Finish an IN_FLIGHT slot: FREE, or PINNED while a view pins it. realtime, monotonic:
 * now, by both clocks, in ns. */
void slot_finish(shmq_map *map, uint32_t slot, int64_t realtime, int64_t monotonic);
/* Make a slot REQUEUED at the end of the requeue ring. after: the seq that it waits for; 0: it may
 * go first. */
void slot_requeue(shmq_map *map, uint32_t slot, uint64_t after);
/* Find `requeue_head_group_end` again after entries were moved. */
void requeue_head_group_find(shmq_map *map);
/* Decide a slot that is MOVING to topic `mark` - 1 by that topic's commit word. */
void slot_move_decide(shmq_slot_desc *s, uint32_t mark, uint64_t committed);
void due_note(shmq_broker *b, uint32_t index, int64_t due);
void defer_drain(shmq_broker *b, shmq_map *map);
/* Note that a message of the queue expires at `when` (CLOCK_REALTIME ns). Needs P or D. */
void expiry_note(shmq_broker *b, shmq_map *map, int64_t when);
/* The earliest time at which the scanner has work: a message falls due or expires. */
int64_t due_first(shmq_map *map);
/* When a message expires, by its own time to live and the queue's; INT64_MAX: never. */
int64_t expiry_of(const shmq_map *map, const shmq_slot_desc *s);
/* A deferred message falls due: from now on the queue's time to live counts, too. Before the slot's
 * state changes. */
void slot_falls_due(shmq_broker *b, shmq_map *map, shmq_slot_desc *s);
/* Be rid of a message that is in no ring and no heap any more: FREE; or convicted, if the queue's
 * settings send such messages to its dead topic, from where the supervisor moves it. held: the slot
 * is counted as in use. */
void cast_out(shmq_broker *b, shmq_map *map, uint32_t slot, enum shmq_dead_reason reason,
              bool held);
/* cast_out for a message at the head of a ring, if it has expired. now: CLOCK_REALTIME ns, 0 if it is
 * not known yet. Returns whether it had. */
bool expired_away(shmq_broker *b, shmq_map *map, uint32_t slot, _Atomic uint32_t *head,
                  int64_t *now);
void wake_takers(shmq_broker *b, shmq_map *map, uint32_t n);
/* Ring the spiller if messages are on disk and few are left in memory before them, or if too many
 * are deferred. Needs no lock. wake_space does it too. */
void spiller_tell(shmq_broker *b, shmq_map *map);
void wake_space(shmq_broker *b, shmq_map *map);
/* An upper bound for the number of messages that wait: READY, REQUEUED, and on disk. Exact if both
 * locks are held; returned messages may come at any time without D. */
uint64_t waiting_count(shmq_map *map);
/* Returns true if the limits of the queue leave room for n more messages of `bytes` in all. Needs no
 * lock. */
bool limits_leave(shmq_map *map, uint64_t n, uint64_t bytes);
/* Find the slot that a take would hand out next, and the ring head that then moves by one.
 * Returns false if there is none. */
bool queue_next(shmq_map *map, uint32_t *slot, _Atomic uint32_t **head, span *at);
/* Sort keys (sort.h): of IN_FLIGHT slots the order of their delivery. */
uint64_t by_delivery(const shmq_slot_desc *s);
/* Of READY slots the seq, of REQUEUED slots the order of their return. */
uint64_t by_order(const shmq_slot_desc *s);
/* Note that nothing is on disk any more, if that is so: READY messages may be taken again. Returns
 * true if waiters are to be woken, after D is released. */
bool disk_is_empty(shmq_queue_desc *q);

static inline shmq_topic_desc *topic_of(const shmq_broker *b, const shmq_map *map)
{
	return &b->topics[map->topic];
}

static inline uint32_t ring_count(_Atomic uint32_t *head, _Atomic uint32_t *tail)
{
	/* SYNC(ready-head) SYNC(ready-tail) SYNC(defer-head) SYNC(defer-tail)
	 * SYNC(requeue-head) SYNC(requeue-tail) SYNC(free-head) SYNC(free-tail) */
	return ld_acquire(tail) - ld_acquire(head);
}

static inline uint64_t bytes_budget(const shmq_map *map)
{
	return map->arena_max / 4 * 3;
}

/* A MOVING slot on its way to another topic: the owner's bits say to which. 0: to the channels of its
 * own topic, else the topic's index + 1. */
static inline uint32_t slot_moves_to(uint64_t word)
{
	return SHMQ_OWNER_OF(word);
}

/* Returns true if one more message may be held: held messages must leave room for the spill. */
static inline bool may_hold_more(const shmq_map *map)
{
	shmq_queue_desc *q = map->q;

	return ld(&q->in_use) < map->in_flight_slots &&
	       (!ld(&q->in_use) || ld(&q->in_use_bytes) <= bytes_budget(map));
}

/* Returns true if the counts that decide about room can be true. */
static inline bool counts_are_sane(shmq_map *map)
{
	shmq_queue_desc *q = map->q;
	uint32_t n = slots_of(map);

	return TRUST_CHECK(ring_count(&q->ready_head, &q->ready_tail) <= n && ld(&q->in_use) <= n &&
	                   ld(&q->leased) <= n && ld(&q->spilling_count) <= n &&
	                   ld(&q->spilling) <= 1 &&
	                   ld(&q->in_use_bytes) <= map->arena_max + (uint64_t)n * SHMQ_ARENA_HEAD);
}

/* Count one message of a session less in flight. */
static inline void session_leave(shmq_session_desc *s)
{
	if (ld(&s->in_flight))
		st(&s->in_flight, ld(&s->in_flight) - 1);
}

/* Returns true if messages of the queue never go to disk. */
static inline bool keeps_memory(const shmq_map *map)
{
	return map->q->flags & SHMQ_FLAG_EPHEMERAL || has_policy(map, SHMQ_POLICY_MEMORY);
}

/* The bytes of READY bodies, with SHMQ_POLICY_BYTES. */
static inline uint64_t ready_bytes(shmq_queue_desc *q)
{
	uint64_t out = ld(&q->ready_bytes_out);

	return ld(&q->ready_bytes_in) - out;
}

/* Count bytes of bodies that are READY no more. */
static inline void ready_bytes_left(shmq_map *map, uint64_t bytes)
{
	if (has_policy(map, SHMQ_POLICY_BYTES))
		bump(&map->q->ready_bytes_out, bytes);
}

/* Returns true if the message may expire: most cannot, which costs one look. */
static inline bool may_expire(const shmq_map *map, const shmq_slot_desc *s)
{
	return once(s->flags) & SHMQ_SLOT_EXPIRES || has_policy(map, SHMQ_POLICY_EXPIRY);
}

/* Bytes of a message's body, without its properties: a READY one's are in the queue's `ready_bytes`. */
static inline uint64_t body_bytes(const shmq_slot_desc *s)
{
	uint32_t properties = s->flags & SHMQ_SLOT_PROPERTIES ? s->properties & ~SHMQ_SLOT_SEALED : 0;

	return s->length - (properties < s->length ? properties : s->length);
}

static inline uint64_t block_bytes(const shmq_slot_desc *s)
{
	return (uint64_t)s->capacity + SHMQ_ARENA_HEAD;
}

static inline bool on_disk(shmq_queue_desc *q)
{
	return ld(&q->disk_read) != ld(&q->disk_write) || ld(&q->spilling); /* SYNC(spilling) */
}

/* Returns true if deferred messages have to make room: they take half of the budget, or too many
 * bytes. */
static inline bool defers_many(const shmq_map *map)
{
	shmq_queue_desc *q = map->q;
	uint32_t deferred = ld(&q->deferred_len) + ring_count(&q->defer_head, &q->defer_tail);

	return deferred &&
	       (deferred > map->in_flight_slots / 2 || ld(&q->in_use_bytes) > map->arena_max / 8 * 5);
}

/* A field of a slot that has another meaning in each state (layout.h). LEASED: the lease. */
static inline uint64_t slot_lease_id(const shmq_slot_desc *s)
{
	return s->move;
}

/* IN_FLIGHT, and SPILLING from it: the order of delivery. */
static inline uint64_t slot_delivery_order(const shmq_slot_desc *s)
{
	return s->move;
}

/* MOVING: the sequence number that the message gets in the channels. */
static inline uint64_t slot_moved_seq(const shmq_slot_desc *s)
{
	return s->move;
}

/* DEFERRED, and PREPARED to become it: CLOCK_REALTIME ns; PREPARED to become READY: 0. */
static inline int64_t slot_due(const shmq_slot_desc *s)
{
	return s->deadline;
}

static inline uint64_t word_next(uint64_t word, unsigned state)
{
	return SHMQ_WORD(state, 0, SHMQ_GENERATION_OF(word));
}

/* The state that a SPILLING or MOVING slot gets back if it stays in memory. */
static inline unsigned previous_of(const shmq_slot_desc *s)
{
	return s->previous == SHMQ_READY || s->previous == SHMQ_DEFERRED ? s->previous : SHMQ_REQUEUED;
}

static inline uint32_t free_slot(shmq_map *map, uint32_t ahead)
{
	return map->free[(ld(&map->q->free_head) + ahead) & ring_mask_of(map)];
}

/* The slot at `ahead` in the free ring, if it is FREE and owns a block that is long enough, and
 * its body; else NULL. */
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

/* The bytes that the message's record takes on disk. Returns false if its body is not inside the
 * arena. */
bool slot_record_bytes(shmq_map *map, const shmq_slot_desc *s, uint32_t *bytes);

#endif
