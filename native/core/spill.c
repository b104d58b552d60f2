/*
 * Overflow: memory to disk. The files themselves are the supervisor's; here are the slots and the
 * commit word disk_write (file << 40 | offset).
 *
 *   spill    READY (RETURNED: BACK) -> SPILLING(pos not known: none), written outside the locks, then
 *            under D the positions, then disk_write, then FREE. Below disk_write: on disk. Above it:
 *            in memory.
 */
#include "atomics.h"
#include "chunk.h"
#include "doorbell.h"
#include "handles.h"
#include "heap.h"
#include "killpoint.h"
#include "lease.h"
#include "locking.h"
#include "mapping.h"
#include "plant.h"
#include "prepend.h"
#include "rebuild.h"
#include "record.h"
#include "sane.h"
#include "segment.h"
#include "shmq.h"
#include "shmq_supervisor.h"
#include "slots.h"

int shmq_advance(shmq_broker *b, uint32_t queue, uint32_t n, int64_t until, uint32_t *moved)
{
	shmq_map *map;
	shmq_queue_desc *q;
	int r = map_get(b, queue, &map);

	*moved = 0;
	if (r)
		return r;
	touch(b, queue);
	r = queue_lock(b, map, until);
	if (r)
		goto out;
	q = map->q;
	defer_drain(b, map); /* into `held` */
	while (*moved < n && ld(&q->ready_head) != ld_acquire(&q->ready_tail) &&
	       ld(&q->held) < map->inflight_slots) {
		uint32_t head = ld(&q->ready_head), slot = map->ready[head & ring_mask_of(map)];

		if (!slot_is(map, slot, SHMQ_READY)) {
			queue_broken(map);
			break;
		}
		slot_back(map, slot, 0);
		SHMQ_KILLPOINT("advance.back");
		st_release(&q->ready_head, head + 1);
		held_add(map, slot);
		++*moved;
	}
	st(&q->overflowed, 1);
	queue_unlock(map);
	wake_takers(b, map, 1);
	wake_space(b, map);
out:
	map_release(map);
	return r;
}

static bool spill_add(shmq_map *map, shmq_spill *out, uint32_t n, uint64_t max_bytes, uint32_t slot,
                      unsigned previous)
{
	shmq_slot_desc *s = &map->slots[slot];
	uint32_t length;
	span at;

	if (!slot_is(map, slot, previous) || !body_in(map, s, &at)) {
		queue_broken(map);
		return false;
	}
	length = at.length + RECORD_HEAD;
	if (out->count == n || (out->count && out->bytes + length > max_bytes))
		return false;
	if (!SHMQ_PLANTED(4))
		s->pos = SHMQ_NO_POSITION;
	s->previous = (uint16_t)previous;
	SHMQ_KILLPOINT("spill.fields");
	st_release(&s->word, word_next(ld(&s->word), SHMQ_SPILLING));
	SHMQ_KILLPOINT("spill.state");
	bump(&map->q->spilling_count, 1);
	out->slots[out->count] = slot;
	out->lengths[out->count] = length;
	out->bytes += length;
	out->count++;
	return true;
}

static void spill_ready(shmq_map *map, shmq_spill *out, uint32_t n, uint64_t max_bytes)
{
	shmq_queue_desc *q = map->q;
	uint32_t head = ld(&q->ready_head), tail = ld_acquire(&q->ready_tail);

	for (; head != tail; head++) {
		uint32_t slot = map->ready[head & ring_mask_of(map)];

		if (!spill_add(map, out, n, max_bytes, slot, SHMQ_READY))
			break;
		st_release(&q->ready_head, head + 1);
		SHMQ_KILLPOINT("spill.head");
	}
}

/* A flush: the messages in flight (they are the oldest), the requeue ring, the ready ring. */
static void spill_all(shmq_broker *b, shmq_map *map, shmq_spill *out, uint32_t n,
                      uint64_t max_bytes)
{
	shmq_queue_desc *q = map->q;
	uint32_t inflight = at_most(ld(&q->inflight_len), slots_of(map)), mask = ring_mask_of(map), tail;

	defer_drain(b, map);
	tail = ld(&q->requeue_tail);
	if (!gather_inflight(map, tail, inflight))
		return;
	for (uint32_t i = 0; i < inflight; i++) {
		uint32_t slot = slot_in(map, &map->requeue[(tail + i) & mask]);
		shmq_session_desc *its = session_of(map, &map->slots[slot]);

		if (!spill_add(map, out, n, max_bytes, slot, SHMQ_INFLIGHT))
			return;
		heap_remove(&map->inflight, slot);
		held_remove(map, slot);
		if (its)
			session_leave(its);
	}
	while (ld(&q->requeue_head) != ld(&q->requeue_tail)) {
		uint32_t slot = map->requeue[ld(&q->requeue_head) & mask];

		if (!spill_add(map, out, n, max_bytes, slot, SHMQ_BACK))
			return;
		st_release(&q->requeue_head, ld(&q->requeue_head) + 1);
		held_remove(map, slot);
	}
	spill_ready(map, out, n, max_bytes);
}

/* Returns true if the message may go behind newer ones without breaking FIFO: it already waits
 * for others (`after`), or, with OUT, it has been delivered before. */
static bool may_wait(const shmq_slot_desc *s, const shmq_spill *out)
{
	return s->after || (out->from == SHMQ_SPILL_OUT && s->attempts);
}

/* Mark the youngest of those in the requeue ring; the rest of the ring closes up. */
static void spill_returned(shmq_map *map, shmq_spill *out, uint32_t n, uint64_t max_bytes)
{
	shmq_queue_desc *q = map->q;
	uint32_t head = ld(&q->requeue_head), tail = ld(&q->requeue_tail), mask = ring_mask_of(map);
	uint32_t first = tail, chosen = 0, to;
	uint64_t bytes = 0;

	for (uint32_t at = tail; at != head && chosen < n; at--) {
		shmq_slot_desc *s = &map->slots[map->requeue[(at - 1) & mask]];
		uint32_t length;

		if (!slot_is(map, map->requeue[(at - 1) & mask], SHMQ_BACK)) {
			queue_broken(map);
			return;
		}
		length = s->length + RECORD_HEAD;
		if (!may_wait(s, out))
			continue;
		if (chosen && bytes + length > max_bytes)
			break;
		bytes += length;
		chosen++;
		first = at - 1;
	}
	for (uint32_t at = to = first; at != tail; at++) {
		uint32_t slot = map->requeue[at & mask];

		if (may_wait(&map->slots[slot], out) &&
		    spill_add(map, out, chosen, UINT64_MAX, slot, SHMQ_BACK))
			held_remove(map, slot);
		else
			map->requeue[to++ & mask] = slot;
	}
	st_release(&q->requeue_tail, to);
	requeue_firsts_find(map);
}

/* The deliver lock (D) is held. */
static int spill_some(shmq_broker *b, shmq_map *map, enum shmq_spill_from from, uint32_t n,
                      uint64_t max_bytes, shmq_spill *out)
{
	if (ld(&map->q->base_pending))
		return SHMQ_EMPTY; /* its files still have another name */
	if (from == SHMQ_SPILL_AHEAD || from == SHMQ_SPILL_ALL)
		lease_return_all(map);
	if (from == SHMQ_SPILL_AHEAD)
		return ahead_begin(map, n, out);
	if (from == SHMQ_SPILL_FRONT && lease_has_run(map))
		return SHMQ_EMPTY; /* it begins where the read position is */
	st(&map->q->spilling, 1); /* counts as "on disk": READY messages after it wait */
	SHMQ_KILLPOINT("spill.flag");
	if (from == SHMQ_SPILL_FRONT)
		(void)ahead_begin(map, n, out);
	else if (from == SHMQ_SPILL_ALL)
		spill_all(b, map, out, n, max_bytes);
	else if (from == SHMQ_SPILL_RETURNED || from == SHMQ_SPILL_OUT)
		spill_returned(map, out, n, max_bytes);
	else
		spill_ready(map, out, n, max_bytes);
	if (out->count)
		return 0;
	st(&map->q->spilling, 0);
	return SHMQ_EMPTY;
}

int shmq_spill_begin(shmq_broker *b, uint32_t queue, enum shmq_spill_from from, uint32_t n,
                     uint64_t max_bytes, int64_t until, shmq_spill *out)
{
	shmq_map *map;
	int r = map_get(b, queue, &map);

	if (r)
		return r;
	touch(b, queue);
	out->queue = queue;
	out->from = from;
	out->count = 0;
	out->bytes = 0;
	for (bool repaired = false;; repaired = true) {
		bool broken;

		r = queue_lock(b, map, until);
		if (r)
			break;
		r = spill_some(b, map, from, n, max_bytes, out);
		broken = !out->count && ld(&map->q->dirty);
		queue_unlock(map);
		if (!broken)
			break;
		if (repaired) {
			r = queue_corrupt(map);
			break;
		}
	}
	map_release(map);
	return r;
}

int shmq_spill_encode(shmq_broker *b, const shmq_spill *s, void *buffer)
{
	shmq_map *map;
	uint8_t *at = buffer;
	int r = map_get(b, s->queue, &map);

	if (r)
		return r;
	for (uint32_t i = 0; i < s->count; i++) {
		/* A concurrent rebuild writes `heap` and `pins` of a SPILLING slot; the fields used here do
		 * not change. */
		const shmq_slot_desc *from = &map->slots[s->slots[i]];
		shmq_slot_desc slot = {.id = from->id,
		                       .timestamp = from->timestamp,
		                       .body = once(from->body),
		                       .length = s->lengths[i] - RECORD_HEAD,
		                       .attempts = from->attempts};

		/* The slot was emptied and reused: the batch will be abandoned; stay inside its record. */
		if (!SANE(slot.length <= map->arena_max && slot.body <= map->arena_max - slot.length))
			slot.body = 0;
		record_write(at, &slot, map->arena + slot.body);
		at += s->lengths[i];
	}
	map_release(map);
	return 0;
}

/* Give the slots their previous states; the rings are rebuilt. P and D are held. */
static void spill_undo(shmq_broker *b, shmq_map *map, const shmq_spill *s)
{
	for (uint32_t i = 0; i < s->count; i++) {
		shmq_slot_desc *slot = &map->slots[s->slots[i]];
		uint64_t word = ld(&slot->word);

		if (SHMQ_STATE_OF(word) != SHMQ_SPILLING)
			continue;
		slot->pos = SHMQ_NO_POSITION;
		if (slot->previous == SHMQ_INFLIGHT) {
			slot->order = slot->move;
			slot->after = 0;
			slot->previous = SHMQ_BACK;
		}
		st_release(&slot->word, word_next(word, previous_of(slot)));
	}
	st(&map->q->spilling, 0);
	queue_rebuild(b, map, false);
}

int shmq_spill_end(shmq_broker *b, const shmq_spill *s, uint64_t write_position, bool ok,
                   int64_t until)
{
	shmq_map *map;
	shmq_queue_desc *q;
	bool whole = true;
	int r;

	if (s->from == SHMQ_SPILL_CHUNK)
		return chunk_end(b, s, ok, until);
	r = map_get(b, s->queue, &map);
	if (r)
		return r;
	if (s->from == SHMQ_SPILL_AHEAD || s->from == SHMQ_SPILL_FRONT) {
		r = ahead_end(b, map, s, ok, until);
		goto out;
	}
	q = map->q;
	/* Giving back needs a rebuild, which needs P as well. */
	r = ok ? queue_lock(b, map, until) : both_lock(b, map, until);
	if (r)
		goto out;
	for (uint32_t i = 0; i < s->count; i++)
		whole &= SHMQ_STATE_OF(ld(&map->slots[s->slots[i]].word)) == SHMQ_SPILLING;
	if (ok && !whole) {
		/* The queue was emptied. Slots that are still SPILLING (its emptier died half-way) go back. */
		queue_unlock(map);
		r = both_lock(b, map, until);
		if (r)
			goto out;
		spill_undo(b, map, s);
		disk_is_empty(q);
		both_unlock(b, map);
		r = SHMQ_GONE;
		goto out;
	}
	if (!ok) {
		spill_undo(b, map, s);
		both_unlock(b, map);
		goto out;
	}
	for (uint32_t i = 0; i < s->count; i++)
		map->slots[s->slots[i]].pos = s->positions[i];
	SHMQ_KILLPOINT("spill.positions");
	st_release(&q->disk_write, write_position);
	SHMQ_KILLPOINT("spill.committed");
	bump(&q->disk_depth, s->count);
	bump(&q->spilled, s->count);
	for (uint32_t i = 0; i < s->count; i++) {
		slot_release(map, s->slots[i]);
		SHMQ_KILLPOINT("spill.freed");
	}
	st(&q->spilling_count, ld(&q->spilling_count) - s->count);
	st_release(&q->spilling, 0);
	queue_unlock(map);
	wait_wake(b, &q->space, WAKE_ALL);
out:
	map_release(map);
	return r;
}
