/*
 * Deferred messages that wait on disk, in chunks. The supervisor owns the files; this file moves
 * the slots and stores the two commit words. P is the publish lock, D the deliver lock.
 *
 *   out  DEFERRED -> SPILLING(pos: number of the chunk): out of the heap, but `in_use` still counts
 *        it. The chunk is written outside the locks; then, under D, deferred_write is stored and the
 *        slots become FREE. Chunks up to deferred_write are on disk.
 *   in   under P and D: RESTORED(pos: chunk << 24 | number in it), then deferred_read is stored,
 *        then DEFERRED. Messages of that chunk before deferred_read are in memory.
 *
 * `previous` is DEFERRED in both, which distinguishes them from overflow.
 */
#include "disk/chunk.h"

#include "base/atomics.h"
#include "base/bounds.h"
#include "base/killpoint.h"
#include "base/status.h"
#include "disk/batch.h"
#include "format/record.h"
#include "memory/handles.h"
#include "memory/heap.h"
#include "memory/mapping.h"
#include "memory/segment.h"
#include "publish/room.h"
#include "queue/locking.h"
#include "queue/rebuild.h"
#include "queue/slots.h"
#include "queue/sort.h"
#include "shmq.h"
#include "shmq_supervisor.h"
#include "sync/doorbell.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* Sort keys. */
static uint64_t by_due(const shmq_slot_desc *s)
{
	return (uint64_t)slot_due(s);
}

static uint64_t by_id(const shmq_slot_desc *s)
{
	return s->id;
}

/* Sort the entries of the requeue ring by due time, and those of one due time by id. */
static void due_sort(shmq_map *map, uint32_t tail, uint32_t count)
{
	uint32_t mask = ring_mask_of(map), from = 0;

	sort_slots(map, map->requeue, tail, count, by_due, &map->in_flight);
	for (uint32_t i = 1; i <= count; i++) {
		const uint32_t *first = &map->requeue[(tail + from) & mask];
		const uint32_t *next = &map->requeue[(tail + i) & mask];

		if (i < count &&
		    slot_due(&map->slots[slot_in(map, first)]) == slot_due(&map->slots[slot_in(map, next)]))
			continue;
		sort_slots(map, map->requeue, tail + from, i - from, by_id, &map->in_flight);
		from = i;
	}
}

static bool is_ours(const shmq_map *map, const shmq_spill *s, uint32_t i)
{
	const shmq_slot_desc *slot = &map->slots[s->slots[i]];

	return SHMQ_STATE_OF(ld(&slot->word)) == SHMQ_SPILLING && slot->previous == SHMQ_DEFERRED &&
	       slot->pos == s->position;
}

/* Collect the slots that are due at from_due or later, sorted by due time, in the requeue ring
 * after its tail, which is scratch space. */
static uint32_t choose(shmq_map *map, const batch_wish *wish)
{
	shmq_queue_desc *q = map->q;
	uint32_t mask = ring_mask_of(map), tail = ld(&q->requeue_tail), count = 0;
	uint32_t all = at_most(ld(&q->deferred_len), slots_of(map));
	uint64_t bytes = 0;

	for (uint32_t i = 0; i < all && count < wish->n; i++) {
		uint32_t slot = once(map->deferred.slot[i]), length;

		if (!slot_is(map, slot, SHMQ_DEFERRED) ||
		    !slot_record_bytes(map, &map->slots[slot], &length)) {
			queue_broken(map);
			return 0;
		}
		if (map->deferred.when[i] < wish->from_due)
			continue;
		bytes += length;
		if (count && bytes > wish->max_bytes)
			break;
		map->requeue[(tail + count++) & mask] = slot;
	}
	due_sort(map, tail, count);
	return count;
}

static int begin_some(shmq_broker *b, shmq_map *map, const batch_wish *wish, shmq_spill *out)
{
	shmq_queue_desc *q = map->q;
	uint32_t mask = ring_mask_of(map), tail = ld(&q->requeue_tail), count;

	if (out->position <= ld(&q->deferred_write) || out->position >> (64 - SHMQ_CHUNK_SHIFT))
		return fail(SHMQ_INVALID, "chunk %llu is used already", (unsigned long long)out->position);
	defer_drain(b, map);
	/* While its files still have another name, no file is added to them. */
	count = ld(&q->base_pending) ? 0 : choose(map, wish);
	for (uint32_t i = 0; i < count; i++) {
		uint32_t slot = slot_in(map, &map->requeue[(tail + i) & mask]);
		shmq_slot_desc *s = &map->slots[slot];

		if (!slot_is(map, slot, SHMQ_DEFERRED) || !slot_record_bytes(map, s, &out->lengths[i])) {
			queue_broken(map); /* since it was chosen */
			count = i;
			break;
		}
		s->pos = out->position;
		s->previous = SHMQ_DEFERRED;
		SHMQ_KILLPOINT("chunk.fields");
		st_release(&s->word, word_next(ld(&s->word), SHMQ_SPILLING)); /* SYNC(slot-state) */
		SHMQ_KILLPOINT("chunk.state");
		heap_remove(&map->deferred, slot);
		out->slots[i] = slot;
		out->positions[i] = (uint64_t)slot_due(s);
		out->bytes += out->lengths[i];
	}
	out->count = count;
	return count ? 0 : SHMQ_EMPTY;
}

int shmq_chunk_begin(shmq_broker *b, uint32_t queue, const shmq_chunk_wish *wish, int64_t until,
                     shmq_spill *out)
{
	batch_wish batch = {.n = wish->n, .max_bytes = wish->max_bytes, .from_due = wish->from_due};

	out->source = SHMQ_SPILL_CHUNK;
	out->position = wish->chunk;
	return batch_begin(b, queue, &batch, until, begin_some, out);
}

/* Both locks (P and D) are held. */
static void chunk_undo(shmq_broker *b, shmq_map *map, const shmq_spill *s)
{
	for (uint32_t i = 0; i < s->count; i++)
		if (is_ours(map, s, i)) {
			shmq_slot_desc *slot = &map->slots[s->slots[i]];

			/* SYNC(slot-state) */
			st_release(&slot->word, word_next(ld(&slot->word), SHMQ_DEFERRED));
		}
	queue_rebuild(b, map, false);
}

/* The number up to which chunks were emptied; never above the number of the last chunk. */
static uint64_t gone_of(shmq_queue_desc *q)
{
	uint64_t gone = ld(&q->deferred_gone); /* SYNC(deferred-gone) */

	return TRUST_CHECK(gone <= ld(&q->deferred_write)) ? gone : 0;
}

static bool still_ours(shmq_map *map, const shmq_spill *s)
{
	bool whole = true;

	for (uint32_t i = 0; i < s->count; i++)
		whole &= is_ours(map, s, i);
	return whole;
}

int chunk_end(shmq_broker *b, shmq_map *map, const shmq_spill *s, bool ok, int64_t until)
{
	shmq_queue_desc *q = map->q;
	bool commit = ok;
	int r = batch_lock(b, map, s, until, still_ours, &commit);

	if (r)
		return r;
	if (!commit) {
		chunk_undo(b, map, s);
		both_unlock(b, map);
		return ok ? SHMQ_GONE : 0;
	}
	if (gone_of(q) != ld(&q->deferred_gone))
		st(&q->deferred_gone, 0); /* otherwise this chunk would inherit it */
	SHMQ_KILLPOINT("chunk.written");
	st_release(&q->deferred_write, s->position); /* SYNC(deferred-write) */
	SHMQ_KILLPOINT("chunk.committed");
	bump(&q->deferred_depth, s->count);
	for (uint32_t i = 0; i < s->count; i++) {
		in_use_remove(map, s->slots[i]);
		slot_release(map, s->slots[i]);
		SHMQ_KILLPOINT("chunk.freed");
	}
	queue_unlock(map);
	wait_wake(b, &q->space, WAKE_ALL);
	return 0;
}

/* Both locks (P and D) are held. */
static int load_some(shmq_broker *b, shmq_map *map, const shmq_chunk_records *in,
                     const uint64_t *lengths, uint32_t n)
{
	uint8_t *body;
	shmq_queue_desc *q = map->q;
	uint64_t position = in->position, read = ld(&q->deferred_read), at = 0, size;
	record rec;

	if (position >> SHMQ_CHUNK_SHIFT <= gone_of(q))
		return SHMQ_GONE;
	if (position >> SHMQ_CHUNK_SHIFT == read >> SHMQ_CHUNK_SHIFT && position != read)
		return fail(SHMQ_INVALID, "of chunk %llu message %llu is next",
		            (unsigned long long)(read >> SHMQ_CHUNK_SHIFT),
		            (unsigned long long)(read & ((1u << SHMQ_CHUNK_SHIFT) - 1)));
	/* A repair inside the lock call may have taken the bodies back. */
	for (uint32_t i = 0; i < n; i++)
		if (!free_slot_for(map, i, lengths[i], &body))
			return SHMQ_AGAIN;
	defer_drain(b, map);
	for (uint32_t i = 0; i < n; i++, at += size) {
		shmq_slot_desc *s = free_slot_for(map, i, lengths[i], &body);

		if (!s) { /* the free ring names one twice */
			queue_broken(map);
			return SHMQ_AGAIN;
		}
		(void)record_read((const uint8_t *)in->data + at, in->length - at, UINT32_MAX, &rec, &size);
		record_place(
				s, body, &rec,
				record_is_sealed(&rec, (const uint8_t *)b->d->seal_key, topic_of(b, map)->name));
		s->order = 0;
		s->deadline = in->dues[i];
		s->previous = SHMQ_DEFERRED;
		s->pos = position + i;
		SHMQ_KILLPOINT("load.fields");
		st_release(&s->word, word_next(ld(&s->word), SHMQ_RESTORED)); /* SYNC(slot-state) */
		SHMQ_KILLPOINT("load.state");
	}
	st_release(&q->deferred_read, position + n); /* SYNC(deferred-read) */
	SHMQ_KILLPOINT("load.committed");
	for (uint32_t i = 0; i < n; i++) {
		uint32_t slot = free_slot(map, i);
		shmq_slot_desc *s = &map->slots[slot];

		if (!slot_is(map, slot, SHMQ_RESTORED)) {
			queue_broken(map);
			continue;
		}
		st_release(&s->word, word_next(ld(&s->word), SHMQ_DEFERRED)); /* SYNC(slot-state) */
		SHMQ_KILLPOINT("load.deferred");
		heap_push(&map->deferred, slot_due(s), slot);
		in_use_add(map, slot);
	}
	st_release(&q->free_head, ld(&q->free_head) + n); /* SYNC(free-head) */
	SHMQ_KILLPOINT("load.head");
	st(&q->deferred_depth, ld(&q->deferred_depth) > n ? ld(&q->deferred_depth) - n : 0);
	due_note(b, map->index, heap_first(&map->deferred));
	return 0;
}

int shmq_chunk_load(shmq_broker *b, uint32_t queue, const shmq_chunk_records *records,
                    int64_t until, uint32_t *taken)
{
	const uint8_t *data = records->data;
	uint64_t length = records->length, at = 0, size;
	uint32_t n = records->n, found = 0;
	uint64_t *lengths = malloc((n + 1) * sizeof(uint64_t));
	shmq_map *map = NULL;
	record rec;
	int r = lengths ? map_get(b, queue, &map) : SHMQ_NO_MEMORY;

	*taken = 0;
	if (r)
		goto out;
	client_note_queue(b, queue);
	while (found < n && record_read(data + at, length - at, UINT32_MAX, &rec, &size) > 0) {
		lengths[found++] = record_length(&rec);
		at += size;
	}
	if (found != n || at != length) {
		r = fail(SHMQ_INVALID, "a chunk is loaded by whole records, each with its due time");
		goto out;
	}
	r = restore_lock(b, map, lengths, &n, until);
	if (!r) {
		r = load_some(b, map, records, lengths, n);
		both_unlock(b, map);
	}
	if (!r)
		*taken = n;
	if (r == SHMQ_EMPTY)
		r = 0;
out:
	map_release(map);
	free(lengths);
	return r;
}

int shmq_chunk_depth(shmq_broker *b, uint32_t queue, uint64_t depth, int64_t until)
{
	shmq_map *map;
	int r = queue_enter(b, queue, until, &map);

	if (r)
		return r;
	st(&map->q->deferred_depth, depth);
	queue_unlock(map);
	map_release(map);
	return 0;
}

int shmq_chunk_start(int fd, uint64_t highest, uint64_t depth)
{
	shmq_queue_desc *q;
	struct stat found;
	uint8_t *base;
	int r;

	if (fstat(fd, &found) || (uint64_t)found.st_size < sizeof(*q))
		return fail(SHMQ_INVALID, "this is no queue segment");
	r = segment_map(fd, sizeof(*q), &base);
	if (r)
		return r;
	q = (shmq_queue_desc *)(void *)base;
	st(&q->deferred_depth, depth);
	st_release(&q->deferred_write, highest); /* SYNC(deferred-write) */
	segment_unmap(base, sizeof(*q));
	return 0;
}
