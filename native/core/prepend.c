/*
 * Writing messages in front of those on disk.
 *
 *   INFLIGHT, BACK -> RESTORED(pos in front of disk_read) under D, written outside the locks where all
 *   has been read, then disk_read, then FREE. Below disk_read: in memory. Above it: on disk.
 */
#include "prepend.h"

#include "atomics.h"
#include "doorbell.h"
#include "handles.h"
#include "heap.h"
#include "killpoint.h"
#include "lease.h"
#include "locking.h"
#include "rebuild.h"
#include "record.h"
#include "sane.h"
#include "segment.h"
#include "shmq.h"
#include "shmq_supervisor.h"
#include "slots.h"

bool gather_inflight(shmq_map *map, uint32_t tail, uint32_t n)
{
	uint32_t mask = ring_mask_of(map);

	for (uint32_t i = 0; i < n; i++) {
		uint32_t slot = map->inflight.slot[i];

		if (!slot_is(map, slot, SHMQ_INFLIGHT) || !body_is_in(map, &map->slots[slot])) {
			queue_broken(map);
			return false;
		}
		map->requeue[(tail + i) & mask] = slot;
	}
	sort_slots(map->requeue, mask, tail, n, map->slots, by_delivery);
	return true;
}

static bool was_never_out(const shmq_slot_desc *s)
{
	return !s->attempts && !s->after;
}

static int by_turn(const shmq_slot_desc *x, const shmq_slot_desc *y)
{
	int difference = was_never_out(x) - was_never_out(y);

	return difference ? difference : by_order(x, y);
}

bool keep_turns(shmq_map *map)
{
	shmq_queue_desc *q = map->q;
	uint32_t head = ld(&q->requeue_head), tail = ld(&q->requeue_tail), mask = ring_mask_of(map);
	uint64_t order = ld(&q->order);
	bool sane = SANE(tail - head <= slots_of(map));

	for (uint32_t at = head; sane && at != tail; at++) {
		uint32_t slot = map->requeue[at & mask];

		sane = slot_is(map, slot, SHMQ_BACK) && body_is_in(map, &map->slots[slot]);
	}
	if (!sane) {
		queue_broken(map);
		return false;
	}
	sort_slots(map->requeue, mask, head, tail - head, map->slots, by_turn);
	st(&q->order, order + (tail - head));
	/* The youngest first: wherever a death ends this, the rest is in the order of publishing. */
	for (uint32_t at = tail; at != head; at--) {
		shmq_slot_desc *s = &map->slots[map->requeue[(at - 1) & mask]];

		if (!was_never_out(s))
			break;
		s->order = order + (at - head);
	}
	requeue_firsts_find(map);
	return true;
}

static void ahead_mark(shmq_slot_desc *s, unsigned previous, uint64_t order, uint64_t pos)
{
	s->order = order; /* if they are given back */
	s->after = 0;
	s->pos = pos;
	s->previous = (uint16_t)previous;
	SHMQ_KILLPOINT("ahead.fields");
	st_release(&s->word, word_next(ld(&s->word), SHMQ_RESTORED));
	SHMQ_KILLPOINT("ahead.state");
}

int ahead_begin(shmq_map *map, uint32_t n, shmq_spill *out)
{
	bool live = out->from == SHMQ_SPILL_FRONT;
	shmq_queue_desc *q = map->q;
	uint32_t inflight = live ? 0 : at_most(ld(&q->inflight_len), slots_of(map));
	uint32_t head = ld(&q->requeue_head), tail = ld(&q->requeue_tail), first, all;
	uint32_t mask = ring_mask_of(map);
	uint64_t read = ld(&q->disk_read), before = read & ((UINT64_C(1) << 40) - 1), bytes = 0;
	uint64_t order;

	first = all = inflight + (tail - head);
	if ((!live && read == ld(&q->disk_write)) || !all)
		return SHMQ_EMPTY;
	if (!SANE(all <= slots_of(map))) {
		queue_broken(map);
		return SHMQ_EMPTY;
	}
	if (!keep_turns(map) || !gather_inflight(map, tail, inflight))
		return SHMQ_EMPTY;
	order = ld(&q->order);
#define NTH(i)                                                                                     \
	slot_in(map, &map->requeue[((i) < inflight ? tail + (i) : head + (i) - inflight) & mask])
	for (; first && all - first < n; first--) {
		uint64_t length = map->slots[NTH(first - 1)].length + RECORD_HEAD;

		if ((before && bytes + length > before) || (live && map->slots[NTH(first - 1)].after))
			break;
		bytes += length;
	}
	if (!read || first == all || (!live && first && (bytes != before || !(read >> 40))))
		return SHMQ_FULL;
	out->position = before ? read - bytes : read - SHMQ_POS(1, 0);
	st(&q->order, order + (all - first));
	out->count = all - first;
	out->bytes = bytes;
	/* The youngest first: whenever a death ends this, those that are not marked yet come before it. */
	for (uint32_t i = all; i-- > first;) {
		shmq_slot_desc *s = &map->slots[NTH(i)];
		uint32_t length = s->length + RECORD_HEAD;

		bytes -= length;
		out->slots[i - first] = NTH(i);
		out->lengths[i - first] = length;
		ahead_mark(s, i < inflight ? SHMQ_INFLIGHT : SHMQ_BACK, order + 1 + (i - first),
		           out->position + bytes);
	}
	for (uint32_t i = first; i < all; i++) {
		uint32_t slot = NTH(i);
		shmq_session_desc *its = session_of(map, &map->slots[slot]);

		held_remove(map, slot);
		if (i >= inflight)
			continue;
		heap_remove(&map->inflight, slot);
		if (its)
			session_leave(its);
	}
	st_release(&q->requeue_tail, first < inflight ? head : head + first - inflight);
	requeue_firsts_find(map);
#undef NTH
	return 0;
}

/* Both locks (P and D) are held. */
static void ahead_undo(shmq_broker *b, shmq_map *map, const shmq_spill *s)
{
	for (uint32_t i = 0; i < s->count; i++) {
		shmq_slot_desc *slot = &map->slots[s->slots[i]];
		uint64_t word = ld(&slot->word);

		if (SHMQ_STATE_OF(word) == SHMQ_RESTORED)
			st_release(&slot->word, word_next(word, SHMQ_BACK));
	}
	if (s->from == SHMQ_SPILL_FRONT)
		st(&map->q->spilling, 0);
	queue_rebuild(b, map, false);
}

int ahead_end(shmq_broker *b, shmq_map *map, const shmq_spill *s, bool ok, int64_t until)
{
	bool live = s->from == SHMQ_SPILL_FRONT, whole = true;
	shmq_queue_desc *q = map->q;
	int r = ok ? queue_lock(b, map, until) : both_lock(b, map, until);

	if (r)
		return r;
	/* A concurrent repair has made them BACK, or the queue was emptied. */
	for (uint32_t i = 0; i < s->count; i++)
		whole &= SHMQ_STATE_OF(ld(&map->slots[s->slots[i]].word)) == SHMQ_RESTORED;
	whole &= !(live && lease_has_run(map)); /* since the batch was begun; it stays where it is */
	if (ok && !whole) {
		queue_unlock(map);
		r = both_lock(b, map, until);
		if (r)
			return r;
	}
	if (!ok || !whole) {
		ahead_undo(b, map, s);
		both_unlock(b, map);
		if (live)
			wake_takers(b, map, WAKE_ALL);
		return ok ? SHMQ_GONE : 0;
	}
	if (lease_has_run(map))
		lease_return_all(map); /* taken since the batch was begun; it would end up after it */
	st_release(&q->disk_read, s->position);
	SHMQ_KILLPOINT("ahead.committed");
	bump(&q->disk_depth, s->count);
	bump(&q->spilled, s->count);
	for (uint32_t i = 0; i < s->count; i++) {
		slot_release(map, s->slots[i]);
		SHMQ_KILLPOINT("ahead.freed");
	}
	if (live)
		st_release(&q->spilling, 0);
	queue_unlock(map);
	wait_wake(b, &q->space, WAKE_ALL);
	if (live)
		wake_takers(b, map, 1); /* a consumer that came meanwhile saw neither these nor, perhaps, the disk */
	return 0;
}
