/*
 * Reading messages back from disk, and evicting messages that were read ahead.
 *
 *   restore  under the publish and the deliver lock: RESTORED(pos) with its order, then disk_read
 *            is stored, then REQUEUED.
 */
#include "base/atomics.h"
#include "base/killpoint.h"
#include "base/status.h"
#include "disk/prepend.h"
#include "format/record.h"
#include "memory/handles.h"
#include "memory/mapping.h"
#include "memory/segment.h"
#include "publish/room.h"
#include "queue/lease.h"
#include "queue/locking.h"
#include "queue/slots.h"
#include "shmq.h"
#include "shmq_supervisor.h"
#include "sync/doorbell.h"

#include <stdlib.h>

static int restore_some(shmq_broker *b, shmq_map *map, const shmq_records *in,
                        const uint64_t *lengths, uint32_t n, uint64_t *used)
{
	shmq_queue_desc *q = map->q;
	uint32_t mask = ring_mask_of(map), tail = ld(&q->requeue_tail);
	uint64_t order = ld(&q->order);
	uint8_t *body;

	if (ld(&q->disk_read) != in->position || lease_has_run(map))
		return SHMQ_GONE;
	/* A repair inside the lock call may have taken the bodies back. */
	for (uint32_t i = 0; i < n; i++)
		if (!free_slot_for(map, i, lengths[i], &body))
			return SHMQ_AGAIN;
	st(&q->order, order + n);
	for (uint32_t i = 0; i < n; i++) {
		shmq_slot_desc *s = free_slot_for(map, i, lengths[i], &body);
		record rec;
		uint64_t size;

		if (!s) { /* the free ring names one twice */
			queue_broken(map);
			return SHMQ_AGAIN;
		}
		(void)record_read((const uint8_t *)in->data + *used, in->length - *used, UINT32_MAX, &rec,
		                  &size);
		record_place(
				s, body, &rec,
				record_is_sealed(&rec, (const uint8_t *)b->d->seal_key, topic_of(b, map)->name));
		s->order = order + 1 + i;
		s->deadline = 0;
		s->previous = SHMQ_FREE;
		s->pos = in->position + *used;
		SHMQ_KILLPOINT("restore.fields");
		st_release(&s->word, word_next(ld(&s->word), SHMQ_RESTORED)); /* SYNC(slot-state) */
		SHMQ_KILLPOINT("restore.state");
		*used += size;
	}
	/* SYNC(disk-read) */
	st_release(&q->disk_read, *used == in->length ? in->next_position : in->position + *used);
	SHMQ_KILLPOINT("restore.committed");
	for (uint32_t i = 0; i < n; i++) {
		uint32_t slot = free_slot(map, i);
		shmq_slot_desc *s = &map->slots[slot];

		if (!slot_is(map, slot, SHMQ_RESTORED)) {
			queue_broken(map);
			continue;
		}
		st_release(&s->word, word_next(ld(&s->word), SHMQ_REQUEUED)); /* SYNC(slot-state) */
		SHMQ_KILLPOINT("restore.back");
		map->requeue[(tail + i) & mask] = slot;
		in_use_add(map, slot);
	}
	st_release(&q->free_head, ld(&q->free_head) + n); /* SYNC(free-head) */
	SHMQ_KILLPOINT("restore.head");
	q->requeue_head_group_end = tail + n;
	st_release(&q->requeue_tail, tail + n); /* SYNC(requeue-tail) */
	st(&q->disk_depth, ld(&q->disk_depth) > n ? ld(&q->disk_depth) - n : 0);
	bump(&q->restored, n);
	return 0;
}

int shmq_restore(shmq_broker *b, uint32_t queue, const shmq_records *records, int64_t until,
                 uint32_t *taken, uint64_t *used)
{
	const uint8_t *data = records->data;
	uint64_t length = records->length, at = 0, size;
	uint64_t *lengths = malloc((length / SHMQ_RECORD_HEAD + 1) * sizeof(uint64_t));
	shmq_map *map = NULL;
	uint32_t n = 0;
	bool emptied = false;
	record rec;
	int r = lengths ? map_get(b, queue, &map) : SHMQ_NO_MEMORY;

	*taken = 0;
	*used = 0;
	if (r)
		goto out;
	client_note_queue(b, queue);
	while (at < length && record_read(data + at, length - at, UINT32_MAX, &rec, &size) > 0) {
		lengths[n++] = record_length(&rec);
		at += size;
	}
	if (at != length) {
		r = fail(SHMQ_INVALID, "restore takes whole records only");
		goto out;
	}
	r = restore_lock(b, map, lengths, &n, until);
	if (!r) {
		r = restore_some(b, map, records, lengths, n, used);
		emptied = !r && disk_is_empty(map->q);
		both_unlock(b, map);
	}
	if (r == SHMQ_EMPTY)
		r = 0;
	else if (!r) {
		*taken = n;
		wake_takers(b, map, emptied ? WAKE_ALL : n);
	} else {
		*used = 0;
	}
out:
	map_release(map);
	free(lengths);
	return r;
}

/* Find the longest run at the end of the requeue ring whose records lie right before the read
 * position. Returns where in the ring it begins; position: of its first record. */
static uint32_t read_ahead_find(shmq_map *map, uint64_t *position)
{
	shmq_queue_desc *q = map->q;
	uint32_t mask = ring_mask_of(map), head = ld(&q->requeue_head), tail = ld(&q->requeue_tail), at;

	for (at = tail; at != head; at--) {
		uint32_t slot = map->requeue[(at - 1) & mask];
		shmq_slot_desc *s = &map->slots[slot];
		uint32_t length;

		if (!slot_is(map, slot, SHMQ_REQUEUED) || !slot_record_bytes(map, s, &length)) {
			queue_broken(map);
			return tail;
		}
		/* A record that this version would write with another length is not recognised, and stays
		 * in memory. */
		if (s->pos == SHMQ_NO_POSITION || s->previous != SHMQ_FREE ||
		    SHMQ_POS_FILE(s->pos) != SHMQ_POS_FILE(*position) || s->pos + length != *position)
			break;
		*position = s->pos;
	}
	return at;
}

/* Drop the end of the requeue ring from `at` on, by moving the read position back to `position`. */
static void read_ahead_drop(shmq_map *map, uint32_t at, uint64_t position)
{
	shmq_queue_desc *q = map->q;
	uint32_t mask = ring_mask_of(map), tail = ld(&q->requeue_tail);

	if (at == tail)
		return;
	for (uint32_t i = at; i != tail; i++) {
		shmq_slot_desc *s = &map->slots[map->requeue[i & mask]];

		st_release(&s->word, word_next(ld(&s->word), SHMQ_RESTORED)); /* SYNC(slot-state) */
		SHMQ_KILLPOINT("evict_read_ahead.state");
	}
	st_release(&q->disk_read, position); /* SYNC(disk-read) */
	SHMQ_KILLPOINT("evict_read_ahead.committed");
	bump(&q->disk_depth, tail - at);
	for (uint32_t i = at; i != tail; i++) {
		uint32_t slot = map->requeue[i & mask];

		in_use_remove(map, slot);
		slot_release(map, slot);
	}
	st_release(&q->requeue_tail, at); /* SYNC(requeue-tail) */
	requeue_head_group_find(map);
}

int shmq_evict_read_ahead(shmq_broker *b, uint32_t queue, int64_t until, uint32_t *count)
{
	shmq_map *map;
	int r;

	*count = 0;
	r = queue_enter(b, queue, until, &map);
	if (r)
		return r;
	if (!lease_has_run(map)) { /* a run begins at the read position */
		uint64_t position = ld(&map->q->disk_read);
		uint32_t at;

		(void)requeue_sort(map);
		at = read_ahead_find(map, &position);
		*count = ld(&map->q->requeue_tail) - at;
		read_ahead_drop(map, at, position);
	}
	queue_unlock(map);
	if (*count)
		wake_space(b, map);
	map_release(map);
	return 0;
}
