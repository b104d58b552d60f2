/*
 * Writing messages in front of those on disk.
 *
 * Under the deliver lock (D) the slots become RESTORED(pos), with positions right before disk_read.
 * The records are written outside the locks, over records that have been read. Then, under D,
 * disk_read is stored and the slots become FREE. A message below disk_read is in memory, one at or
 * above it is on disk.
 */
#include "disk/prepend.h"

#include "base/atomics.h"
#include "base/bounds.h"
#include "base/killpoint.h"
#include "disk/batch.h"
#include "format/record.h"
#include "memory/handles.h"
#include "memory/heap.h"
#include "memory/segment.h"
#include "queue/lease.h"
#include "queue/locking.h"
#include "queue/rebuild.h"
#include "queue/slots.h"
#include "queue/sort.h"
#include "shmq.h"
#include "shmq_supervisor.h"
#include "sync/doorbell.h"

bool gather_in_flight(shmq_map *map, uint32_t tail, uint32_t n)
{
	uint32_t mask = ring_mask_of(map);

	for (uint32_t i = 0; i < n; i++) {
		uint32_t slot = map->in_flight.slot[i];

		if (!slot_is(map, slot, SHMQ_IN_FLIGHT) || !body_is_in(map, &map->slots[slot])) {
			queue_broken(map);
			return false;
		}
		map->requeue[(tail + i) & mask] = slot;
	}
	sort_slots(map, map->requeue, tail, n, by_delivery, &map->deferred);
	return true;
}

static bool was_never_out(const shmq_slot_desc *s)
{
	return !s->attempts && !s->after;
}

/* A sort key: those that were out come first. An order has 63 bits at most. */
static uint64_t by_turn(const shmq_slot_desc *s)
{
	return (uint64_t)was_never_out(s) << 63 | s->order;
}

bool requeue_sort(shmq_map *map)
{
	shmq_queue_desc *q = map->q;
	uint32_t head = ld(&q->requeue_head), tail = ld(&q->requeue_tail), mask = ring_mask_of(map);
	uint64_t order = ld(&q->order);
	bool sane = TRUST_CHECK(tail - head <= slots_of(map));

	for (uint32_t at = head; sane && at != tail; at++) {
		uint32_t slot = map->requeue[at & mask];

		sane = slot_is(map, slot, SHMQ_REQUEUED) && body_is_in(map, &map->slots[slot]);
	}
	if (!sane) {
		queue_broken(map);
		return false;
	}
	sort_slots(map, map->requeue, head, tail - head, by_turn, &map->in_flight);
	st(&q->order, order + (tail - head));
	/* The youngest first: wherever a death ends this, the rest is in the order of publishing. */
	for (uint32_t at = tail; at != head; at--) {
		shmq_slot_desc *s = &map->slots[map->requeue[(at - 1) & mask]];

		if (!was_never_out(s))
			break;
		s->order = order + (at - head);
	}
	requeue_head_group_find(map);
	return true;
}

static void prepend_mark(shmq_slot_desc *s, unsigned previous, uint64_t order, uint64_t pos)
{
	s->order = order; /* if they are given back */
	s->after = 0;
	s->pos = pos;
	s->previous = (uint8_t)previous;
	SHMQ_KILLPOINT("prepend.fields");
	st_release(&s->word, word_next(ld(&s->word), SHMQ_RESTORED)); /* SYNC(slot-state) */
	SHMQ_KILLPOINT("prepend.state");
}

/* The messages in the order of delivery: those in flight, noted in the requeue ring after its tail,
 * then those of the ring. */
typedef struct candidates {
	shmq_map *map;
	uint32_t in_flight, head, tail, mask;
	bool live; /* PREPEND: none in flight */
} candidates;

static uint32_t nth(const candidates *c, uint32_t i)
{
	uint32_t at = i < c->in_flight ? c->tail + i : c->head + (i - c->in_flight);

	return slot_in(c->map, &c->map->requeue[at & c->mask]);
}

/* Find the youngest messages, at most n, that may be written and fit into `space` (0: into a file of
 * their own). Returns the index of the first. out: the lengths of their records, and those together. */
static uint32_t fitting(const candidates *c, uint32_t all, uint32_t n, uint64_t space,
                        shmq_spill *out)
{
	uint32_t first = all, *lengths = out->lengths;

	for (out->bytes = 0; first && all - first < n; first--) {
		const shmq_slot_desc *s = &c->map->slots[nth(c, first - 1)];
		uint32_t length;

		if (!slot_record_bytes(c->map, s, &length) || (space && out->bytes + length > space) ||
		    (c->live && s->after))
			break;
		out->bytes += length;
		lengths[all - first] = length; /* the youngest first */
	}
	for (uint32_t i = 0, k = all - first; i + 1 < k; i++) {
		uint32_t length = lengths[i];

		lengths[i] = lengths[--k];
		lengths[k] = length;
	}
	return first;
}

/* Mark the messages from `first` on. The youngest comes first: whenever a death ends this, the
 * messages that are not marked yet come before the others. */
static void candidates_mark(const candidates *c, uint32_t first, shmq_spill *out)
{
	shmq_queue_desc *q = c->map->q;
	uint64_t order = ld(&q->order), at = out->position + out->bytes;

	st(&q->order, order + out->count);
	for (uint32_t i = out->count; i--;) {
		uint32_t slot = nth(c, first + i);
		shmq_slot_desc *s = &c->map->slots[slot];

		out->slots[i] = slot;
		at -= out->lengths[i];
		prepend_mark(s, first + i < c->in_flight ? SHMQ_IN_FLIGHT : SHMQ_REQUEUED, order + 1 + i,
		             at);
	}
}

/* Take the marked messages out of the heap and the end of the requeue ring. */
static void candidates_take(const candidates *c, uint32_t first, uint32_t all)
{
	shmq_map *map = c->map;

	for (uint32_t i = first; i < all; i++) {
		uint32_t slot = nth(c, i);
		shmq_session_desc *its = session_of(map, &map->slots[slot]);

		in_use_remove(map, slot);
		if (i >= c->in_flight)
			continue;
		heap_remove(&map->in_flight, slot);
		if (its)
			session_leave(its);
	}
	/* SYNC(requeue-tail) */
	st_release(&map->q->requeue_tail,
	           first < c->in_flight ? c->head : c->head + (first - c->in_flight));
	requeue_head_group_find(map);
}

int prepend_begin(shmq_map *map, uint32_t n, shmq_spill *out)
{
	shmq_queue_desc *q = map->q;
	bool live = out->source == SHMQ_SPILL_PREPEND;
	candidates c = {.map = map,
	                .in_flight = live ? 0 : at_most(ld(&q->in_flight_len), slots_of(map)),
	                .head = ld(&q->requeue_head),
	                .tail = ld(&q->requeue_tail),
	                .mask = ring_mask_of(map),
	                .live = live};
	uint32_t all = c.in_flight + (c.tail - c.head), first;
	uint64_t read = ld(&q->disk_read), space = SHMQ_POS_OFFSET(read);

	if ((!live && read == ld(&q->disk_write)) || !all)
		return SHMQ_EMPTY;
	if (!TRUST_CHECK(all <= slots_of(map))) {
		queue_broken(map);
		return SHMQ_EMPTY;
	}
	if (!requeue_sort(map) || !gather_in_flight(map, c.tail, c.in_flight))
		return SHMQ_EMPTY;
	first = fitting(&c, all, n, space, out);
	/* A flush leaves none behind, unless the others get the file before this one. */
	if (!read || first == all ||
	    (!live && first && (out->bytes != space || !SHMQ_POS_FILE(read)))) {
		out->bytes = 0;
		return SHMQ_FULL;
	}
	out->position = space ? read - out->bytes : read - SHMQ_POS(1, 0);
	out->count = all - first;
	candidates_mark(&c, first, out);
	candidates_take(&c, first, all);
	return 0;
}

/* Both locks (P and D) are held. */
static void prepend_undo(shmq_broker *b, shmq_map *map, const shmq_spill *s)
{
	for (uint32_t i = 0; i < s->count; i++) {
		shmq_slot_desc *slot = &map->slots[s->slots[i]];
		uint64_t word = ld(&slot->word);

		if (SHMQ_STATE_OF(word) == SHMQ_RESTORED)
			st_release(&slot->word, word_next(word, SHMQ_REQUEUED)); /* SYNC(slot-state) */
	}
	if (s->source == SHMQ_SPILL_PREPEND)
		st(&map->q->spilling, 0);
	queue_rebuild(b, map, false);
}

/* Returns false if a concurrent repair has made them REQUEUED, the queue was emptied, or a lease was
 * taken since whose records on disk begin at the read position. */
static bool still_restored(shmq_map *map, const shmq_spill *s)
{
	bool whole = s->source != SHMQ_SPILL_PREPEND || !lease_has_run(map);

	for (uint32_t i = 0; i < s->count; i++)
		whole &= SHMQ_STATE_OF(ld(&map->slots[s->slots[i]].word)) == SHMQ_RESTORED;
	return whole;
}

int prepend_end(shmq_broker *b, shmq_map *map, const shmq_spill *s, bool ok, int64_t until)
{
	bool live = s->source == SHMQ_SPILL_PREPEND, commit = ok;
	shmq_queue_desc *q = map->q;
	int r = batch_lock(b, map, s, until, still_restored, &commit);

	if (r)
		return r;
	if (!commit) {
		prepend_undo(b, map, s);
		both_unlock(b, map);
		if (live)
			wake_takers(b, map, WAKE_ALL);
		return ok ? SHMQ_GONE : 0;
	}
	if (lease_has_run(map))
		lease_return_all(map); /* taken since the batch was begun: its messages come first */
	st_release(&q->disk_read, s->position); /* SYNC(disk-read) */
	SHMQ_KILLPOINT("prepend.committed");
	bump(&q->disk_depth, s->count);
	bump(&q->spilled, s->count);
	for (uint32_t i = 0; i < s->count; i++) {
		slot_release(map, s->slots[i]);
		SHMQ_KILLPOINT("prepend.freed");
	}
	if (live)
		st_release(&q->spilling, 0); /* SYNC(spilling) */
	queue_unlock(map);
	wait_wake(b, &q->space, WAKE_ALL);
	if (live)
		/* A consumer that came meanwhile saw neither these messages nor, perhaps, the disk. */
		wake_takers(b, map, 1);
	return 0;
}
