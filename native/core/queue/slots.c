/*
 * The steps of one slot: counts, ring entries, its next state, and the wake-ups that follow.
 * Everything here is under the deliver lock (D) unless its declaration says otherwise.
 */
#include "queue/slots.h"

#include "base/atomics.h"
#include "base/bounds.h"
#include "base/clock.h"
#include "base/killpoint.h"
#include "format/record.h"
#include "memory/handles.h"
#include "memory/heap.h"
#include "memory/segment.h"
#include "queue/latency.h"
#include "shmq.h"
#include "sync/doorbell.h"

bool entry_is(const shmq_broker *b, uint32_t index, uint32_t topic)
{
	shmq_entry_desc *e = &b->entries[index];

	return ld_acquire(&e->state) == SHMQ_ENTRY_LIVE && e->topic == topic; /* SYNC(entry-state) */
}

bool queue_is_empty(shmq_queue_desc *q)
{
	/* The ready ring first: a message on its way to the requeue ring is in both. */
	return !ring_count(&q->ready_head, &q->ready_tail) &&
	       !ring_count(&q->requeue_head, &q->requeue_tail) &&
	       !ring_count(&q->defer_head, &q->defer_tail) && !ld(&q->in_use) &&
	       !ld(&q->spilling_count) && !on_disk(q);
}

/* Count whole blocks, not bodies: a small message may use the large block of an earlier one. */
void in_use_add(shmq_map *map, uint32_t slot)
{
	bump(&map->q->in_use, 1);
	bump(&map->q->in_use_bytes, block_bytes(&map->slots[slot]));
}

void in_use_remove(shmq_map *map, uint32_t slot)
{
	st(&map->q->in_use, ld(&map->q->in_use) - 1);
	st(&map->q->in_use_bytes, ld(&map->q->in_use_bytes) - block_bytes(&map->slots[slot]));
}

void free_push(shmq_map *map, uint32_t slot)
{
	uint32_t tail = ld(&map->q->free_tail);

	map->free[tail & ring_mask_of(map)] = slot;
	SHMQ_KILLPOINT("release.ring");
	st_release(&map->q->free_tail, tail + 1); /* SYNC(free-tail) */
}

void slot_release(shmq_map *map, uint32_t slot)
{
	shmq_slot_desc *s = &map->slots[slot];
	uint64_t word = ld(&s->word);

	if (s->pins) {
		st_release(&s->word, word_next(word, SHMQ_PINNED)); /* SYNC(slot-state) */
		in_use_add(map, slot);
		return;
	}
	st_release(&s->word, word_next(word, SHMQ_FREE)); /* SYNC(slot-state) */
	SHMQ_KILLPOINT("release.free");
	free_push(map, slot);
}

void slot_finish(shmq_map *map, uint32_t slot, int64_t realtime, int64_t monotonic)
{
	shmq_slot_desc *s = &map->slots[slot];
	uint64_t ns = latency_since(s->timestamp, realtime);
	unsigned next = s->pins ? SHMQ_PINNED : SHMQ_FREE;
	shmq_session_desc *its;

	st_release(&s->word, word_next(ld(&s->word), next)); /* SYNC(slot-state) */
	SHMQ_KILLPOINT("finish.state");
	latency_record(map->latency, ns, latency_since(s->delivered, monotonic));
	heap_remove(&map->in_flight, slot);
	SHMQ_KILLPOINT("finish.heap");
	its = session_of(map, s);
	if (its)
		session_leave(its);
	if (next == SHMQ_FREE) {
		in_use_remove(map, slot);
		free_push(map, slot);
	}
}

void slot_requeue(shmq_map *map, uint32_t slot, uint64_t after)
{
	shmq_queue_desc *q = map->q;
	shmq_slot_desc *s = &map->slots[slot];
	uint64_t order = ld(&q->order) + 1;
	uint32_t tail = ld(&q->requeue_tail);

	st(&q->order, order);
	s->order = order;
	s->after = after;
	s->pos = SHMQ_NO_POSITION;
	SHMQ_KILLPOINT("back.fields");
	st_release(&s->word, word_next(ld(&s->word), SHMQ_REQUEUED)); /* SYNC(slot-state) */
	SHMQ_KILLPOINT("back.state");
	map->requeue[tail & ring_mask_of(map)] = slot;
	SHMQ_KILLPOINT("back.ring");
	if (!after)
		q->requeue_head_group_end = tail + 1;
	st_release(&q->requeue_tail, tail + 1); /* SYNC(requeue-tail) */
}

void requeue_head_group_find(shmq_map *map)
{
	shmq_queue_desc *q = map->q;
	uint32_t head = ld(&q->requeue_head), at = ld(&q->requeue_tail);

	if (!TRUST_CHECK(at - head <= slots_of(map))) {
		queue_broken(map);
		return;
	}
	for (; at != head; at--) {
		uint32_t slot = map->requeue[(at - 1) & ring_mask_of(map)];

		if (!slot_is(map, slot, SHMQ_REQUEUED)) {
			queue_broken(map);
			break;
		}
		if (!map->slots[slot].after)
			break;
	}
	q->requeue_head_group_end = at;
}

void slot_move_decide(shmq_slot_desc *s, uint32_t mark, uint64_t committed)
{
	uint64_t word = ld(&s->word);

	if (SHMQ_STATE_OF(word) != SHMQ_MOVING || slot_moves_to(word) != mark)
		return;
	/* SYNC(slot-state) */
	st_release(&s->word,
	           word_next(word, slot_moved_seq(s) <= committed ? SHMQ_PINNED : previous_of(s)));
	SHMQ_KILLPOINT("recover.moved");
}

void due_note(shmq_broker *b, uint32_t index, int64_t due)
{
	int64_t have = ld(&b->next_due[index]);

	while (due < have)
		if (atomic_compare_exchange_weak(&b->next_due[index], &have, due)) { /* SYNC(due-time) */
			scanner_ring(b, INT64_MAX, due);
			return;
		}
}

/* The least time between two sweeps of a queue, so that a stream of short lives costs little. */
#define SWEEP_EVERY (NS_PER_S / 2)

void expiry_note(shmq_broker *b, shmq_map *map, int64_t when)
{
	int64_t have = ld(&map->q->next_expiry), soonest = realtime_ns() + SWEEP_EVERY;

	if (when >= have)
		return;
	if (when < soonest)
		when = soonest;
	while (when < have)
		if (atomic_compare_exchange_weak(&map->q->next_expiry, &have, when))
			break;
	due_note(b, map->index, when);
}

int64_t due_first(shmq_map *map)
{
	int64_t due = heap_first(&map->deferred), expiry = ld(&map->q->next_expiry);

	if (expiry <= SHMQ_DUE_CONVICTED)
		expiry = SHMQ_DUE_CONVICTED + 1; /* that one says that a convicted message waits */
	return due < expiry ? due : expiry;
}

int64_t expiry_of(const shmq_map *map, const shmq_slot_desc *s)
{
	unsigned flags = once(s->flags); /* SYNC(slot-expiry) */
	int64_t own = flags & SHMQ_SLOT_EXPIRES ? s->expires : INT64_MAX, its;
	bool waits_to_be_due = SHMQ_STATE_OF(ld(&s->word)) == SHMQ_DEFERRED && !s->attempts;
	bool was_due = flags & SHMQ_SLOT_WAS_DUE;

	if (!has_policy(map, SHMQ_POLICY_EXPIRY) || waits_to_be_due ||
	    (was_due && flags & SHMQ_SLOT_EXPIRES))
		return own;
	its = later(was_due ? s->expires : s->timestamp, message_ttl_of(map));
	return its < own ? its : own;
}

void slot_falls_due(shmq_broker *b, shmq_map *map, shmq_slot_desc *s)
{
	int64_t own = s->flags & SHMQ_SLOT_EXPIRES ? s->expires : INT64_MAX, its;
	unsigned flags = SHMQ_SLOT_WAS_DUE;

	if (!s->attempts && !(s->flags & SHMQ_SLOT_WAS_DUE)) {
		if (has_policy(map, SHMQ_POLICY_EXPIRY)) {
			its = later(slot_due(s), message_ttl_of(map));
			own = its < own ? its : own;
			flags |= SHMQ_SLOT_EXPIRES;
		}
		s->expires = (s->flags | flags) & SHMQ_SLOT_EXPIRES ? own : slot_due(s);
		fence_full(); /* SYNC(slot-expiry) */
		SHMQ_KILLPOINT("due.expires");
		s->flags |= (uint8_t)flags;
	}
	if (own != INT64_MAX)
		expiry_note(b, map, own);
}

#define VERDICT ((unsigned)SHMQ_SLOT_CONVICTED | 3u << SHMQ_SLOT_REASON_SHIFT)

void cast_out(shmq_broker *b, shmq_map *map, uint32_t slot, enum shmq_dead_reason reason, bool held)
{
	shmq_slot_desc *s = &map->slots[slot];
	uint32_t wanted = reason == SHMQ_DEAD_EXPIRED ? SHMQ_EXPIRED_TO_DEAD : SHMQ_OVERFLOW_TO_DEAD;

	if (settings_of(map)->flags & wanted && ld(&b->entries[map->index].role) == SHMQ_ROLE_CHANNEL) {
		s->flags = (uint8_t)((s->flags & ~VERDICT) | SHMQ_SLOT_CONVICTED |
		                     (unsigned)reason << SHMQ_SLOT_REASON_SHIFT);
		s->previous = SHMQ_READY; /* it was not in flight: no process and no time to tell of */
		s->deadline = SHMQ_DUE_CONVICTED;
		SHMQ_KILLPOINT("cast.fields");
		st_release(&s->word, word_next(ld(&s->word), SHMQ_DEFERRED)); /* SYNC(slot-state) */
		SHMQ_KILLPOINT("cast.state");
		if (!held)
			in_use_add(map, slot);
		heap_push(&map->deferred, SHMQ_DUE_CONVICTED, slot);
		due_note(b, map->index, SHMQ_DUE_CONVICTED);
	} else {
		if (held)
			in_use_remove(map, slot);
		slot_release(map, slot);
	}
	bump(reason == SHMQ_DEAD_EXPIRED ? &map->q->expired : &map->q->dropped_oldest, 1);
}

bool expired_away(shmq_broker *b, shmq_map *map, uint32_t slot, _Atomic uint32_t *head,
                  int64_t *now)
{
	shmq_slot_desc *s = &map->slots[slot];
	bool ready = head == &map->q->ready_head;

	if (!*now)
		*now = realtime_ns();
	if (expiry_of(map, s) > *now)
		return false;
	st_release(head, ld(head) + 1); /* SYNC(ready-head) SYNC(requeue-head) */
	SHMQ_KILLPOINT("expire.head");
	if (ready)
		ready_bytes_left(map, body_bytes(s));
	cast_out(b, map, slot, SHMQ_DEAD_EXPIRED, !ready);
	return true;
}

/* Deferred publishes come through a ring of their own, so that they never wait for the disk. */
void defer_drain(shmq_broker *b, shmq_map *map)
{
	shmq_queue_desc *q = map->q;
	uint32_t head = ld(&q->defer_head), tail = ld_acquire(&q->defer_tail); /* SYNC(defer-tail) */

	if (head == tail)
		return;
	for (; head != tail; head++) {
		uint32_t slot = map->defer[head & ring_mask_of(map)];

		if (!slot_is(map, slot, SHMQ_DEFERRED)) {
			queue_broken(map);
			return;
		}
		heap_push(&map->deferred, slot_due(&map->slots[slot]), slot);
		in_use_add(map, slot);
		SHMQ_KILLPOINT("defer.heap");
		st_release(&q->defer_head, head + 1); /* SYNC(defer-head) */
	}
	due_note(b, map->index, heap_first(&map->deferred));
}

void wake_takers(shmq_broker *b, shmq_map *map, uint32_t n)
{
	wait_wake(b, &map->q->takers, n);
}

void spiller_tell(shmq_broker *b, shmq_map *map)
{
	shmq_queue_desc *q = map->q;
	uint32_t waiting = ld(&q->requeue_tail) - ld(&q->requeue_head);

	if ((ld(&q->disk_read) != ld(&q->disk_write) && waiting < map->low_water) ||
	    (defers_many(map) && !keeps_memory(map)))
		spiller_ring(b, map->index);
}

uint64_t waiting_count(shmq_map *map)
{
	shmq_queue_desc *q = map->q;
	/* In the order in which a message moves from one to the next, so that it is never missed. */
	uint64_t ready = ring_count(&q->ready_head, &q->ready_tail), spilling = ld(&q->spilling_count);
	uint64_t disk = ld(&q->disk_depth);

	return ready + spilling + disk + ring_count(&q->requeue_head, &q->requeue_tail);
}

/* The most messages that may wait, as far as the queue's settings say. */
static uint64_t most_messages(const shmq_map *map)
{
	uint64_t most = settings_of(map)->max_messages, budget = ready_budget(map);

	return most && most < budget ? most : budget;
}

bool limits_leave(shmq_map *map, uint64_t n, uint64_t bytes)
{
	uint64_t most = settings_of(map)->max_bytes;

	return waiting_count(map) + n <= most_messages(map) &&
	       (!most || ready_bytes(map->q) + bytes <= most);
}

/* Returns true if so much room is free that a publisher is woken: what it needs, and at least a
 * quarter of what the limits allow. */
static bool limits_have_space(shmq_map *map)
{
	uint64_t n = ld(&map->q->need_slots), bytes = ld(&map->q->need_bytes);
	uint64_t most = most_messages(map), quarter = settings_of(map)->max_bytes / 4;

	if (n < most / 4)
		n = most / 4;
	if (bytes < quarter)
		bytes = quarter;
	return limits_leave(map, n ? n : 1, bytes) ||
	       !ring_count(&map->q->ready_head, &map->q->ready_tail);
}

/* Wake a waiting publisher when a quarter of the room is free, so that a full queue does not
 * cost one wake-up per message. The publisher also looks every 10 ms, so a slow consumer delays
 * it no longer. */
void wake_space(shmq_broker *b, shmq_map *map)
{
	shmq_queue_desc *q = map->q;
	uint32_t budget, ready;

	fence_unlocked(); /* SYNC(wake) */
	spiller_tell(b, map);
	if (!ld(&q->space.summary))
		return;
	budget = ready_budget(map);
	ready = ring_count(&q->ready_head, &q->ready_tail) + ld(&q->spilling_count);
	if (has_policy(map, SHMQ_POLICY_LIMITS) ? limits_have_space(map) : ready <= budget - budget / 4)
		wait_wake(b, &q->space, WAKE_ALL);
}

/* Hand out nothing from a ring whose entry is in the wrong state or has no body. */
static bool may_be_taken(shmq_map *map, uint32_t slot, unsigned state, span *at)
{
	if (slot_is(map, slot, state) && body_in(map, &map->slots[slot], at))
		return true;
	queue_broken(map);
	return false;
}

bool queue_next(shmq_map *map, uint32_t *slot, _Atomic uint32_t **head, span *at)
{
	shmq_queue_desc *q = map->q;
	uint32_t back = ld(&q->requeue_head), ready = ld(&q->ready_head), mask = ring_mask_of(map);
	uint32_t first;
	bool have_ready;

	if ((int32_t)(q->ready_tail_cached - ready) <= 0)      /* a spill may have overtaken it */
		q->ready_tail_cached = ld_acquire(&q->ready_tail); /* SYNC(ready-tail) */
	have_ready = ready != q->ready_tail_cached && !on_disk(q);
	first = have_ready ? once(map->ready[ready & mask]) : SHMQ_NONE;

	if (back != ld(&q->requeue_tail)) {
		uint64_t after;

		*slot = once(map->requeue[back & mask]);
		*head = &q->requeue_head;
		if (!may_be_taken(map, *slot, SHMQ_REQUEUED, at))
			return false;
		/* A requeued message waits for the messages that were published before it came back. It
		 * does not wait if those may not be taken (the budget counts it already, so it would wait
		 * for itself), nor if entries after it go first (READY messages were published after
		 * them). */
		after = map->slots[*slot].after;
		if (!have_ready || !after || (int32_t)(q->requeue_head_group_end - back) > 0 ||
		    !may_hold_more(map))
			return true;
		if (!slot_is(map, first, SHMQ_READY)) {
			queue_broken(map);
			return false;
		}
		if (map->slots[first].order >= after)
			return true;
	}
	*slot = first;
	*head = &q->ready_head;
	if (have_ready && may_hold_more(map))
		return may_be_taken(map, first, SHMQ_READY, at);
	if (have_ready && !counts_are_sane(map))
		queue_broken(map);
	return false;
}

uint64_t by_delivery(const shmq_slot_desc *s)
{
	return slot_delivery_order(s);
}

uint64_t by_order(const shmq_slot_desc *s)
{
	return s->order;
}

bool slot_record_bytes(shmq_map *map, const shmq_slot_desc *s, uint32_t *bytes)
{
	span at;
	record r;

	if (!body_in(map, s, &at))
		return false;
	r = record_of(s, map->arena + at.body, at.length, at.properties);
	*bytes = (uint32_t)record_bytes(&r);
	return true;
}

bool disk_is_empty(shmq_queue_desc *q)
{
	if (on_disk(q))
		return false;
	st(&q->overflowed, 0);
	st(&q->disk_depth, 0);
	return true;
}
