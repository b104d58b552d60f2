/*
 * Overflow: memory to disk. The supervisor owns the files; this file moves the slots and stores the
 * commit word disk_write (file << 40 | offset).
 *
 * Under the deliver lock (D) the slots become SPILLING without a position. The records are written
 * outside the locks. Then, under D, the slots get their positions, disk_write is stored, and the
 * slots become FREE. A message below disk_write is on disk, one at or above it is in memory.
 */
#include "base/atomics.h"
#include "base/bounds.h"
#include "base/killpoint.h"
#include "disk/batch.h"
#include "disk/chunk.h"
#include "disk/prepend.h"
#include "format/record.h"
#include "memory/handles.h"
#include "memory/heap.h"
#include "memory/mapping.h"
#include "memory/segment.h"
#include "queue/lease.h"
#include "queue/locking.h"
#include "queue/rebuild.h"
#include "queue/slots.h"
#include "shmq.h"
#include "shmq_supervisor.h"
#include "sync/doorbell.h"

int shmq_stage_oldest(shmq_broker *b, uint32_t queue, uint32_t n, int64_t until, uint32_t *moved)
{
	shmq_map *map;
	shmq_queue_desc *q;
	int r;

	*moved = 0;
	r = queue_enter(b, queue, until, &map);
	if (r)
		return r;
	q = map->q;
	defer_drain(b, map); /* so that `in_use` counts them */
	while (*moved < n && ld(&q->ready_head) != ld_acquire(&q->ready_tail) && /* SYNC(ready-tail) */
	       ld(&q->in_use) < map->in_flight_slots) {
		uint32_t head = ld(&q->ready_head), slot = map->ready[head & ring_mask_of(map)];

		if (!slot_is(map, slot, SHMQ_READY)) {
			queue_broken(map);
			break;
		}
		slot_requeue(map, slot, 0);
		SHMQ_KILLPOINT("stage.back");
		st_release(&q->ready_head, head + 1); /* SYNC(ready-head) */
		ready_bytes_left(map, body_bytes(&map->slots[slot]));
		in_use_add(map, slot);
		++*moved;
	}
	st(&q->overflowed, 1);
	queue_unlock(map);
	wake_takers(b, map, 1);
	wake_space(b, map);
	map_release(map);
	return 0;
}

static bool spill_add(shmq_map *map, shmq_spill *out, uint32_t n, uint64_t max_bytes, uint32_t slot,
                      unsigned previous)
{
	shmq_slot_desc *s = &map->slots[slot];
	uint32_t length;

	if (!slot_is(map, slot, previous) || !slot_record_bytes(map, s, &length)) {
		queue_broken(map);
		return false;
	}
	if (out->count == n || (out->count && out->bytes + length > max_bytes))
		return false;
	s->pos = SHMQ_NO_POSITION;
	s->previous = (uint8_t)previous;
	SHMQ_KILLPOINT("spill.fields");
	st_release(&s->word, word_next(ld(&s->word), SHMQ_SPILLING)); /* SYNC(slot-state) */
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
	uint32_t head = ld(&q->ready_head), tail = ld_acquire(&q->ready_tail); /* SYNC(ready-tail) */

	for (; head != tail; head++) {
		uint32_t slot = map->ready[head & ring_mask_of(map)];

		if (!spill_add(map, out, n, max_bytes, slot, SHMQ_READY))
			break;
		st_release(&q->ready_head, head + 1); /* SYNC(ready-head) */
		ready_bytes_left(map, body_bytes(&map->slots[slot]));
		SHMQ_KILLPOINT("spill.head");
	}
}

/* Mark for a flush: the messages in flight (they are the oldest), the requeue ring, the ready
 * ring. */
static void spill_all(shmq_broker *b, shmq_map *map, shmq_spill *out, uint32_t n,
                      uint64_t max_bytes)
{
	shmq_queue_desc *q = map->q;
	uint32_t in_flight = at_most(ld(&q->in_flight_len), slots_of(map)), mask = ring_mask_of(map),
			 tail;

	defer_drain(b, map);
	tail = ld(&q->requeue_tail);
	if (!gather_in_flight(map, tail, in_flight))
		return;
	for (uint32_t i = 0; i < in_flight; i++) {
		uint32_t slot = slot_in(map, &map->requeue[(tail + i) & mask]);
		shmq_session_desc *its = session_of(map, &map->slots[slot]);

		if (!spill_add(map, out, n, max_bytes, slot, SHMQ_IN_FLIGHT))
			return;
		heap_remove(&map->in_flight, slot);
		in_use_remove(map, slot);
		if (its)
			session_leave(its);
	}
	while (ld(&q->requeue_head) != ld(&q->requeue_tail)) {
		uint32_t slot = map->requeue[ld(&q->requeue_head) & mask];

		if (!spill_add(map, out, n, max_bytes, slot, SHMQ_REQUEUED))
			return;
		st_release(&q->requeue_head, ld(&q->requeue_head) + 1); /* SYNC(requeue-head) */
		in_use_remove(map, slot);
	}
	spill_ready(map, out, n, max_bytes);
}

/* Returns true if the message may go behind newer ones without breaking FIFO: it already waits
 * for others (`after`), or, with DELIVERED, it has been delivered before. */
static bool may_wait(const shmq_slot_desc *s, const shmq_spill *out)
{
	return s->after || (out->source == SHMQ_SPILL_DELIVERED && s->attempts);
}

/* Mark the youngest messages of the requeue ring that may wait, and close the gaps in the ring. */
static void spill_returned(shmq_map *map, shmq_spill *out, uint32_t n, uint64_t max_bytes)
{
	shmq_queue_desc *q = map->q;
	uint32_t head = ld(&q->requeue_head), tail = ld(&q->requeue_tail), mask = ring_mask_of(map);
	uint32_t first = tail, chosen = 0, to;
	uint64_t bytes = 0;

	for (uint32_t at = tail; at != head && chosen < n; at--) {
		shmq_slot_desc *s = &map->slots[map->requeue[(at - 1) & mask]];
		uint32_t length;

		if (!slot_is(map, map->requeue[(at - 1) & mask], SHMQ_REQUEUED) ||
		    !slot_record_bytes(map, s, &length)) {
			queue_broken(map);
			return;
		}
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
		    spill_add(map, out, chosen, UINT64_MAX, slot, SHMQ_REQUEUED))
			in_use_remove(map, slot);
		else
			map->requeue[to++ & mask] = slot;
	}
	st_release(&q->requeue_tail, to); /* SYNC(requeue-tail) */
	requeue_head_group_find(map);
}

static int spill_some(shmq_broker *b, shmq_map *map, const batch_wish *wish, shmq_spill *out)
{
	enum shmq_spill_source source = out->source;
	uint32_t n = wish->n;
	uint64_t max_bytes = wish->max_bytes;

	if (ld(&map->q->base_pending))
		return SHMQ_EMPTY; /* its files still have another name */
	if (source == SHMQ_SPILL_PREPEND_FLUSH || source == SHMQ_SPILL_ALL)
		lease_return_all(map);
	if (source == SHMQ_SPILL_PREPEND_FLUSH)
		return prepend_begin(map, n, out);
	if (source == SHMQ_SPILL_PREPEND && lease_has_run(map))
		return SHMQ_EMPTY;    /* the run begins at the read position */
	st(&map->q->spilling, 1); /* counts as "on disk": later READY messages wait */
	SHMQ_KILLPOINT("spill.flag");
	if (source == SHMQ_SPILL_PREPEND)
		(void)prepend_begin(map, n, out);
	else if (source == SHMQ_SPILL_ALL)
		spill_all(b, map, out, n, max_bytes);
	else if (source == SHMQ_SPILL_REQUEUED || source == SHMQ_SPILL_DELIVERED)
		spill_returned(map, out, n, max_bytes);
	else
		spill_ready(map, out, n, max_bytes);
	if (out->count)
		return 0;
	st(&map->q->spilling, 0);
	return SHMQ_EMPTY;
}

int shmq_spill_begin(shmq_broker *b, uint32_t queue, enum shmq_spill_source source, uint32_t n,
                     uint64_t max_bytes, int64_t until, shmq_spill *out)
{
	batch_wish wish = {.n = n, .max_bytes = max_bytes};

	out->source = source;
	return batch_begin(b, queue, &wish, until, spill_some, out);
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
		 * not change. If the slot was emptied and reused, the batch will be abandoned, and this
		 * stays inside its record. */
		const shmq_slot_desc *from = &map->slots[s->slots[i]];
		span body = {0};
		record message;

		if (!body_in(map, from, &body))
			body = (span){0};
		message = record_of(from, map->arena + body.body, body.length, body.properties);
		record_seal(&message, (const uint8_t *)b->d->seal_key, topic_of(b, map)->name);
		record_write(at, s->lengths[i], &message);
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
		if (slot->previous == SHMQ_IN_FLIGHT) {
			slot->order = slot->move;
			slot->after = 0;
			slot->previous = SHMQ_REQUEUED;
		}
		st_release(&slot->word, word_next(word, previous_of(slot))); /* SYNC(slot-state) */
	}
	st(&map->q->spilling, 0);
	queue_rebuild(b, map, false);
}

static bool still_spilling(shmq_map *map, const shmq_spill *s)
{
	bool whole = true;

	for (uint32_t i = 0; i < s->count; i++)
		whole &= SHMQ_STATE_OF(ld(&map->slots[s->slots[i]].word)) == SHMQ_SPILLING;
	return whole;
}

/* The records are written: let the commit word say so, and free the slots. D is held. */
static void spill_commit(shmq_map *map, const shmq_spill *s, uint64_t write_position)
{
	shmq_queue_desc *q = map->q;

	for (uint32_t i = 0; i < s->count; i++)
		map->slots[s->slots[i]].pos = s->positions[i];
	SHMQ_KILLPOINT("spill.positions");
	st_release(&q->disk_write, write_position); /* SYNC(disk-write) */
	SHMQ_KILLPOINT("spill.committed");
	bump(&q->disk_depth, s->count);
	bump(&q->spilled, s->count);
	for (uint32_t i = 0; i < s->count; i++) {
		slot_release(map, s->slots[i]);
		SHMQ_KILLPOINT("spill.freed");
	}
	st(&q->spilling_count, ld(&q->spilling_count) - s->count);
	st_release(&q->spilling, 0); /* SYNC(spilling) */
}

static int append_end(shmq_broker *b, shmq_map *map, const shmq_spill *s, uint64_t write_position,
                      bool ok, int64_t until)
{
	bool commit = ok;
	int r = batch_lock(b, map, s, until, still_spilling, &commit);

	if (r)
		return r;
	if (!commit) {
		/* Slots that are still SPILLING go back; also if the queue was emptied by a process that
		 * died half-way. */
		spill_undo(b, map, s);
		if (ok)
			disk_is_empty(map->q);
		both_unlock(b, map);
		return ok ? SHMQ_GONE : 0;
	}
	spill_commit(map, s, write_position);
	queue_unlock(map);
	wait_wake(b, &map->q->space, WAKE_ALL);
	return 0;
}

int shmq_spill_end(shmq_broker *b, const shmq_spill *s, uint64_t write_position, bool ok,
                   int64_t until)
{
	shmq_map *map;
	int r = map_get(b, s->queue, &map);

	if (r)
		return r;
	if (s->source == SHMQ_SPILL_CHUNK)
		r = chunk_end(b, map, s, ok, until);
	else if (s->source == SHMQ_SPILL_PREPEND_FLUSH || s->source == SHMQ_SPILL_PREPEND)
		r = prepend_end(b, map, s, ok, until);
	else
		r = append_end(b, map, s, write_position, ok, until);
	map_release(map);
	return r;
}
