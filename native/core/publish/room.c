/*
 * Room for a publish or a restore: slots, bodies, and budgets. Under the publish lock (P).
 *
 * No head moves here. death or refusal: free slots that own bodies, which is harmless.
 */
#include "publish/room.h"

#include "base/atomics.h"
#include "base/bounds.h"
#include "base/killpoint.h"
#include "base/status.h"
#include "memory/arena.h"
#include "memory/handles.h"
#include "memory/segment.h"
#include "queue/locking.h"
#include "queue/rebuild.h"
#include "queue/settings.h"
#include "queue/slots.h"
#include "shmq.h"
#include "sync/doorbell.h"

#include <stdio.h>

int restore_lock(shmq_broker *b, shmq_map *map, const uint64_t *lengths, uint32_t *n, int64_t until)
{
	shmq_topic_desc *t = topic_of(b, map);
	int r = topic_lock(b, t, until);

	if (r)
		return r;
	while ((r = *n ? queue_room(b, map, lengths, *n, until) : SHMQ_EMPTY) == SHMQ_FULL ||
	       r == SHMQ_TOO_BIG)
		*n /= 2;
	if (!r)
		r = queue_lock_under(b, map, until);
	if (r)
		topic_unlock(t);
	return r;
}

/* Free the body of a FREE slot. */
static void body_drop(shmq_map *map, shmq_slot_desc *s)
{
	if (s->capacity) {
		if (!arena_free(&map->q->arena, map->arena, arena_of(map), s->body, s->capacity))
			queue_broken(map);
		s->capacity = 0;
	}
}

static bool bodies_drop(shmq_map *map, uint32_t at, uint32_t end)
{
	bool any = false;

	for (; at != end; at++) {
		uint32_t slot = map->free[at & ring_mask_of(map)];
		shmq_slot_desc *s = &map->slots[slot];

		if (!slot_is(map, slot, SHMQ_FREE)) {
			queue_broken(map);
			return false;
		}
		any |= s->capacity != 0;
		body_drop(map, s);
	}
	return any;
}

/* Free the bodies of all finished slots after the `reserved` ones that are about to be used, and
 * bodies that a failed attempt, which wanted more slots, has left there. */
static bool reclaim(shmq_map *map, uint32_t reserved)
{
	shmq_queue_desc *q = map->q;
	uint32_t head = ld(&q->free_head), tail = ld_acquire(&q->free_tail), /* SYNC(free-tail) */
			at = q->bodies_reclaimed_to;
	uint32_t end = q->bodies_prepared_to;
	bool any = false;

	if (!TRUST_CHECK(tail - head <= slots_of(map))) { /* do not walk 2^32 entries */
		queue_broken(map);
		return false;
	}
	if (at - head < reserved || at - head > tail - head)
		at = head + reserved;
	if ((int32_t)(end - at) > 0)
		end = at;
	if ((int32_t)(end - head - reserved) > 0)
		any = bodies_drop(map, head + reserved, end);
	q->bodies_prepared_to = head + reserved;
	any |= bodies_drop(map, at, tail);
	q->bodies_reclaimed_to = tail;
	return any;
}

static bool arena_grow(shmq_map *map, uint64_t bytes)
{
	shmq_queue_desc *q = map->q;
	uint64_t have = arena_of(map), step = have, want;

	if (step > UINT64_C(8) << 20)
		step = UINT64_C(8) << 20;
	if (step < bytes + SHMQ_ARENA_UNIT)
		step = bytes + SHMQ_ARENA_UNIT;
	want = round_page(have + step);
	if (want > map->arena_max)
		want = map->arena_max;
	if (want <= have || queue_grow_arena(map, have, want))
		return false;
	SHMQ_KILLPOINT("arena.committed");
	if (!arena_extend(&q->arena, map->arena, have, want)) {
		queue_broken(map);
		return false;
	}
	st_release(&q->arena_committed, want); /* SYNC(arena-committed) */
	return true;
}

static bool body_ensure(shmq_map *map, shmq_slot_desc *s, uint64_t length, uint32_t reserved)
{
	shmq_queue_desc *q = map->q;
	uint64_t need = arena_block_size(length) - SHMQ_ARENA_HEAD, body, spacious;
	uint32_t capacity;

	/* Reuse the block of the slot's last message unless it is far too big. */
	if (s->capacity >= need && s->capacity <= 4 * need + 1024) {
		if (arena_owns(map->arena, arena_of(map), s->body, s->capacity))
			return true;
		queue_broken(map);
		return false;
	}
	body_drop(map, s);
	/* Small bodies: let the arena grow until every slot can keep its block for the next message. */
	spacious = need > 4096 ? 0 : (uint64_t)slots_of(map) * (need + SHMQ_ARENA_HEAD) * 2;
	for (;;) {
		body = arena_alloc(&q->arena, map->arena, arena_of(map), length, &capacity);
		if (body == ARENA_BROKEN) {
			queue_broken(map);
			return false;
		}
		if (body != ARENA_FAILED)
			break;
		if (arena_of(map) < spacious && arena_grow(map, need + SHMQ_ARENA_HEAD))
			continue;
		if (!reclaim(map, reserved) && !arena_grow(map, need + SHMQ_ARENA_HEAD))
			return false;
	}
	s->body = body;
	s->capacity = capacity;
	return true;
}

static bool bodies_ensure(shmq_map *map, const uint64_t *lengths, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		uint32_t slot = free_slot(map, i);

		if (!slot_is(map, slot, SHMQ_FREE)) {
			queue_broken(map);
			return false;
		}
		slots_ahead(map, slot);
		if (!body_ensure(map, &map->slots[slot], lengths[i], n))
			return false;
		bodies_ahead(map, &map->slots[slot]);
	}
	return true;
}

/* Move the entries of a ring whose mask grew to `wide` to their new places. */
static bool ring_widen(uint32_t *ring, _Atomic uint32_t *head, _Atomic uint32_t *tail,
                       uint32_t mask, uint32_t wide)
{
	uint32_t at = ld(head), end = ld(tail);

	if (!TRUST_CHECK(end - at - 1 <= mask || end == at))
		return false;
	for (; mask != wide && at != end; at++)
		ring[at & wide] = ring[at & mask];
	return true;
}

/* Add the new slots at the end of the free ring. */
static bool slots_add(shmq_map *map, uint32_t from, uint32_t n)
{
	uint32_t tail = ld(&map->q->free_tail), mask = ring_mask_of(map);

	for (uint32_t i = from; i < n; i++) {
		shmq_slot_desc *s = &map->slots[i];

		if (!TRUST_CHECK(SHMQ_STATE_OF(ld(&s->word)) == SHMQ_FREE))
			return false;
		s->heap = SHMQ_NONE;
		s->capacity = 0;
		map->free[tail++ & mask] = i;
	}
	SHMQ_KILLPOINT("grow.free");
	st_release(&map->q->free_tail, tail); /* SYNC(free-tail) */
	return true;
}

/* The most slots that are added at once, so that no publisher waits longer than their pages
 * take. */
#define SLOTS_STEP 65536u

/* How many slots the queue has after the next step: `want` or more, if it may have so many. */
static uint32_t slots_next(shmq_map *map, uint32_t want)
{
	uint32_t have = slots_of(map), n = have + (have < SLOTS_STEP ? have : SLOTS_STEP);

	if (n < want)
		n = want;
	return n < map->slots_max ? n : map->slots_max;
}

/* Add slots: pages first, without D, which consumers need; then one word, then the derived state.
 * death: before the word, pages that nobody knows of; after it, the next locker rebuilds the rest. */
static int slots_grow(shmq_broker *b, shmq_map *map, uint32_t want, int64_t until)
{
	shmq_queue_desc *q = map->q;
	uint32_t have, n, mask, wide;
	int r = queue_ready_slots(map, slots_next(map, want));

	if (r)
		return r;
	SHMQ_KILLPOINT("grow.pages");
	r = queue_lock_under(b, map, until);
	if (r)
		return r;
	have = slots_of(map);
	n = slots_next(map, want); /* again: the lock may have repaired the queue */
	for (mask = wide = ring_mask_of(map); wide < n - 1; wide = 2 * wide + 1)
		;
	r = queue_commit_slots(map, n);
	if (!r) {
		st(&q->dirty, 1);
		SHMQ_KILLPOINT("grow.dirty");
		st(&q->ring_mask, wide);
		SHMQ_KILLPOINT("grow.mask");
		st(&q->slots_committed, n);
		SHMQ_KILLPOINT("grow.slots");
		if (ring_widen(map->ready, &q->ready_head, &q->ready_tail, mask, wide) &&
		    ring_widen(map->defer, &q->defer_head, &q->defer_tail, mask, wide) &&
		    ring_widen(map->requeue, &q->requeue_head, &q->requeue_tail, mask, wide) &&
		    ring_widen(map->free, &q->free_head, &q->free_tail, mask, wide) &&
		    slots_add(map, have, n))
			st_release(&q->dirty, 0); /* SYNC(dirty) */
		else
			r = queue_rebuild(b, map, false);
	}
	queue_unlock(map);
	return r;
}

uint32_t ready_count_cached(shmq_queue_desc *q, uint32_t enough)
{
	if (ld(&q->ready_tail) - q->ready_head_cached > enough)
		q->ready_head_cached = ld_acquire(&q->ready_head); /* SYNC(ready-head) */
	return ld(&q->ready_tail) - q->ready_head_cached;
}

/* A publish or restore of n messages that needs room in one queue. */
typedef struct wish {
	const uint64_t *lengths; /* of the bodies */
	uint32_t n;
	uint64_t bytes; /* of the blocks for them */
	enum purpose purpose;
	int64_t until;
} wish;

/* Store the slots and bytes that a waiting publisher needs, and ring the spiller to make room. */
static int wait_for_room(shmq_broker *b, shmq_map *map, const wish *w)
{
	if (w->purpose == FOR_RESTORE)
		return SHMQ_FULL;
	st(&map->q->need_slots, w->n);
	st(&map->q->need_bytes, w->bytes);
	if (!keeps_memory(map))
		spiller_ring(b, map->index);
	return SHMQ_FULL;
}

/* How many messages the budget of this purpose allows at most. Where messages stay in memory, the
 * deferred ones, which cannot go to disk, may take half of what they share with those in flight. */
static uint32_t budget_of(const shmq_map *map, enum purpose purpose)
{
	if (purpose == FOR_READY)
		return ready_budget(map);
	if (purpose == FOR_DEFERRED && has_policy(map, SHMQ_POLICY_MEMORY))
		return map->in_flight_slots / 2;
	return map->in_flight_slots;
}

/* Returns true if deferred messages would leave consumers too little of the budget that both
 * share. */
static bool defers_too_many(shmq_map *map, const wish *w)
{
	shmq_queue_desc *q = map->q;
	uint32_t deferred;

	/* Other publishes must not read these counts: they are on the consumer's hot line. */
	if (w->purpose != FOR_DEFERRED || !has_policy(map, SHMQ_POLICY_MEMORY))
		return false;
	deferred = ld(&q->deferred_len) + ring_count(&q->defer_head, &q->defer_tail);
	return deferred + w->n > budget_of(map, FOR_DEFERRED) ||
	       (deferred && ld(&q->in_use_bytes) + w->bytes > bytes_budget(map) / 2);
}

/* Returns 0 if the budget allows n more messages; SHMQ_FULL; SHMQ_AGAIN: the counts are garbage.
 * used: how much of the budget is taken. */
static int budget_check(shmq_broker *b, shmq_map *map, const wish *w, uint32_t *used)
{
	shmq_queue_desc *q = map->q;
	bool to_hold = w->purpose != FOR_READY;
	uint32_t budget = to_hold ? map->in_flight_slots : ready_budget(map);

	if (to_hold) {
		*used = ld(&q->in_use) + ring_count(&q->defer_head, &q->defer_tail);
	} else {
		uint32_t spilling = ld(&q->spilling_count);

		*used = w->n + spilling < budget ? budget - w->n - spilling : 0;
		*used = ready_count_cached(q, *used) + spilling;
	}
	if (*used + w->n <= budget && !defers_too_many(map, w) &&
	    !(to_hold && *used && ld(&q->in_use_bytes) + w->bytes > bytes_budget(map)))
		return 0;
	if (counts_are_sane(map))
		return wait_for_room(b, map, w);
	queue_broken(map);
	return SHMQ_AGAIN;
}

/* Make sure that the free ring has n slots. */
static int slots_ensure(shmq_broker *b, shmq_map *map, const wish *w)
{
	shmq_queue_desc *q = map->q;

	for (;;) {
		uint32_t have = q->free_tail_cached - ld(&q->free_head);
		int r;

		if (have >= w->n && TRUST_CHECK(have <= slots_of(map)))
			return 0;
		q->free_tail_cached = ld_acquire(&q->free_tail); /* SYNC(free-tail) */
		have = q->free_tail_cached - ld(&q->free_head);
		if (!TRUST_CHECK(have <= slots_of(map))) {
			queue_broken(map);
			return SHMQ_AGAIN;
		}
		if (have >= w->n)
			return 0;
		if (slots_of(map) == map->slots_max)
			return wait_for_room(b, map, w);
		r = slots_grow(b, map, slots_of(map) - have + w->n, w->until);
		if (r == SHMQ_NO_SPACE)
			return wait_for_room(b, map, w);
		if (r)
			return r;
	}
}

/* Returns true if the bodies that the next n free slots really have exceed the budget. */
static bool blocks_exceed(shmq_map *map, uint32_t n)
{
	uint64_t bytes = ld(&map->q->in_use_bytes);

	for (uint32_t i = 0; i < n; i++)
		bytes += block_bytes(&map->slots[free_slot(map, i)]);
	return bytes > bytes_budget(map);
}

/* Make free slots and bodies for n messages. */
static int room_of(shmq_broker *b, shmq_map *map, const wish *w)
{
	shmq_queue_desc *q = map->q;
	uint32_t used, n = w->n;
	int r = budget_check(b, map, w, &used);

	if (!r)
		r = slots_ensure(b, map, w);
	if (r)
		return r;
	if ((int32_t)(ld(&q->free_head) + n - q->bodies_prepared_to) > 0)
		q->bodies_prepared_to = ld(&q->free_head) + n;
	if (!bodies_ensure(map, w->lengths, n)) {
		/* The missing bytes may belong to the very slots that are about to be used. */
		if (!ld(&q->dirty))
			(void)bodies_drop(map, ld(&q->free_head), ld(&q->free_head) + n);
		if (ld(&q->dirty))
			return SHMQ_AGAIN;
		if (!bodies_ensure(map, w->lengths, n))
			return wait_for_room(b, map, w);
	}
	if (w->purpose == FOR_RESTORE)
		return (used || n > 1) && blocks_exceed(map, n) ? SHMQ_FULL : 0;
	if (ld(&q->need_slots)) {
		st(&q->need_slots, 0);
		st(&q->need_bytes, 0);
	}
	return 0;
}

/* ---- limits ---------------------------------------------------------------------------------- */

/* The name of a queue for a sentence: "topic/channel", or the topic's for a backlog. */
typedef struct queue_name {
	char text[2 * SHMQ_NAME];
} queue_name;

static queue_name name_of(const shmq_broker *b, const shmq_map *map)
{
	const shmq_entry_desc *e = &b->entries[map->index];
	bool channel = ld(&e->role) == SHMQ_ROLE_CHANNEL;
	queue_name name;

	snprintf(name.text, sizeof(name.text), "%.64s%s%.64s", topic_of(b, map)->name,
	         channel ? "/" : "", channel ? e->name : "");
	return name;
}

static int full(const shmq_broker *b, shmq_map *map, const char *setting, uint64_t have,
                uint64_t most, uint32_t n, uint64_t bytes)
{
	st(&map->q->need_slots, n);
	st(&map->q->need_bytes, bytes);
	return fail(SHMQ_FULL, "%s has %llu waiting; its %s is %llu", name_of(b, map).text,
	            (unsigned long long)have, setting, (unsigned long long)most);
}

static int never(const shmq_broker *b, const shmq_map *map, const char *setting, uint64_t want,
                 uint64_t most)
{
	return fail(SHMQ_TOO_BIG, "%llu at once; %s of %s is %llu: publish fewer at once, or raise it",
	            (unsigned long long)want, setting, name_of(b, map).text, (unsigned long long)most);
}

/* Messages that wait and are not READY. */
static uint64_t others_waiting(shmq_queue_desc *q)
{
	uint64_t spilled = ld(&q->spilling_count) + ld(&q->disk_depth);

	return spilled + ring_count(&q->requeue_head, &q->requeue_tail);
}

int limit_check(const shmq_broker *b, shmq_map *map, uint32_t n, uint64_t bytes)
{
	const shmq_settings_desc *s = settings_of(map);
	shmq_queue_desc *q = map->q;
	uint64_t most = s->max_messages, ready, others;

	if (most && n > most)
		return never(b, map, "max_messages", n, most);
	if (s->max_bytes && bytes > s->max_bytes)
		return never(b, map, "max_bytes", bytes, s->max_bytes);
	ready = ready_count_cached(q, most - n < UINT32_MAX ? (uint32_t)(most - n) : 0);
	if (s->overflow == SHMQ_OVERFLOW_DROP_OLDEST && !ready)
		return 0; /* there is nothing to drop: messages that came back stay */
	others = others_waiting(q);
	if (most && ready + others + n > most) {
		/* The noted head may be old, which was enough for READY messages alone. */
		ready = ready_count_cached(q, 0);
		others = others_waiting(q);
	}
	if (most && ready + others + n > most)
		return full(b, map, "max_messages", ready + others, most, n, bytes);
	if (s->max_bytes && ready_bytes(q) + bytes > s->max_bytes)
		return full(b, map, "max_bytes", ready_bytes(q), s->max_bytes, n, bytes);
	return 0;
}

/* Drop the oldest READY message. D is held. Returns false if there is none. */
static bool drop_one(shmq_broker *b, shmq_map *map)
{
	shmq_queue_desc *q = map->q;
	uint32_t head = ld(&q->ready_head), slot;

	if (head == ld_acquire(&q->ready_tail)) /* SYNC(ready-tail) */
		return false;
	slot = map->ready[head & ring_mask_of(map)];
	if (!slot_is(map, slot, SHMQ_READY)) {
		queue_broken(map);
		return false;
	}
	st_release(&q->ready_head, head + 1); /* SYNC(ready-head) */
	SHMQ_KILLPOINT("drop.head");
	ready_bytes_left(map, body_bytes(&map->slots[slot]));
	cast_out(b, map, slot, SHMQ_DEAD_OVERFLOW, false);
	SHMQ_KILLPOINT("drop.free");
	return true;
}

/* Returns true if the queue still has more than its limits allow together with n messages. */
static bool limit_exceeded(shmq_map *map, uint32_t n, uint64_t bytes)
{
	const shmq_settings_desc *s = settings_of(map);

	return (s->max_messages && waiting_count(map) + n > s->max_messages) ||
	       (s->max_bytes && ready_bytes(map->q) + bytes > s->max_bytes);
}

int drop_oldest(shmq_broker *b, shmq_map *map, uint32_t n, uint64_t bytes, uint32_t more,
                int64_t until, uint32_t *dropped)
{
	int r = queue_lock_under(b, map, until);

	*dropped = 0;
	if (r)
		return r;
	while ((*dropped < more || limit_exceeded(map, n, bytes)) && drop_one(b, map))
		++*dropped;
	queue_unlock(map);
	return 0;
}

/* SHMQ_TOO_BIG: more messages or bytes than the queue's memory could ever hold. */
static int size_check(const shmq_map *map, const wish *w)
{
	uint32_t budget = budget_of(map, w->purpose);
	uint64_t has;

	if (w->n > budget)
		return fail(SHMQ_TOO_BIG,
		            "%u messages at once; a queue holds %u%s in memory: publish fewer at once, or "
		            "raise %s",
		            w->n, budget, w->purpose == FOR_DEFERRED ? " deferred ones" : "",
		            w->purpose == FOR_READY ? "mem_queue_size" : "in_flight_slots");
	if (w->bytes > bytes_budget(map))
		return fail(SHMQ_TOO_BIG,
		            "%u messages of %llu bytes in all; a queue holds %llu in memory: publish less "
		            "at once, or raise arena_size",
		            w->n, (unsigned long long)w->bytes, (unsigned long long)bytes_budget(map));
	has = shared_memory_below(w->bytes);
	if (has)
		return fail(SHMQ_TOO_BIG,
		            "%u messages of %llu bytes in all; /dev/shm has %llu: publish less at once, or "
		            "enlarge it (docker run --shm-size=...)",
		            w->n, (unsigned long long)w->bytes, (unsigned long long)has);
	return 0;
}

static wish wish_of(const uint64_t *lengths, uint32_t n, enum purpose purpose, int64_t until)
{
	wish w = {.lengths = lengths, .n = n, .purpose = purpose, .until = until};

	for (uint32_t i = 0; i < n; i++)
		w.bytes += arena_block_size(lengths[i]);
	return w;
}

int room_ever(const shmq_map *map, const uint64_t *lengths, uint32_t n, enum purpose purpose)
{
	const wish w = wish_of(lengths, n, purpose, 0);

	return size_check(map, &w);
}

int room_for(shmq_broker *b, shmq_map *map, const uint64_t *lengths, uint32_t n,
             enum purpose purpose, int64_t until)
{
	const wish w = wish_of(lengths, n, purpose, until);
	int big = size_check(map, &w);

	if (big)
		return big;
	for (bool repaired = false;; repaired = true) {
		int r = words_are_sane(map) ? room_of(b, map, &w) : SHMQ_AGAIN;

		/* AGAIN and not dirty: a lock was held elsewhere. */
		if (r != SHMQ_AGAIN || !(ld(&map->q->dirty) || !words_are_sane(map)))
			return r;
		if (repaired)
			return queue_corrupt(map);
		r = queue_lock_under(b, map, until); /* which repairs */
		if (r)
			return r;
		queue_unlock(map);
	}
}

int queue_room(shmq_broker *b, shmq_map *map, const uint64_t *lengths, uint32_t n, int64_t until)
{
	return room_for(b, map, lengths, n, FOR_RESTORE, until);
}
