/*
 * Reading messages back from disk, and forgetting what was read ahead.
 *
 *   restore  under P and D: RESTORED(pos) with its order, then disk_read, then BACK.
 */
#include "atomics.h"
#include "doorbell.h"
#include "handles.h"
#include "killpoint.h"
#include "lease.h"
#include "locking.h"
#include "mapping.h"
#include "plant.h"
#include "prepend.h"
#include "record.h"
#include "room.h"
#include "segment.h"
#include "shmq.h"
#include "shmq_supervisor.h"
#include "slots.h"
#include "status.h"

#include <stdlib.h>

static int restore_some(shmq_map *map, const uint8_t *data, uint64_t length,
                        const uint64_t *lengths, uint32_t n, uint64_t position,
                        uint64_t next_position, uint64_t *used)
{
	shmq_queue_desc *q = map->q;
	uint32_t mask = ring_mask_of(map), tail = ld(&q->requeue_tail);
	uint64_t order = ld(&q->order);
	uint8_t *body;

	if (ld(&q->disk_read) != position || lease_has_run(map))
		return SHMQ_GONE;
	for (uint32_t i = 0; i < n; i++) /* a repair inside the lock call may have taken the bodies back */
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
		(void)record_read(data + *used, length - *used, UINT32_MAX, &rec, &size);
		record_place(s, body, &rec);
		s->order = order + 1 + i;
		s->deadline = 0;
		s->previous = SHMQ_FREE;
		s->pos = position + *used;
		SHMQ_KILLPOINT("restore.fields");
		st_release(&s->word, word_next(ld(&s->word), SHMQ_RESTORED));
		SHMQ_KILLPOINT("restore.state");
		*used += size;
	}
	if (!SHMQ_PLANTED(5))
		st_release(&q->disk_read, *used == length ? next_position : position + *used);
	SHMQ_KILLPOINT("restore.committed");
	for (uint32_t i = 0; i < n; i++) {
		uint32_t slot = free_slot(map, i);
		shmq_slot_desc *s = &map->slots[slot];

		if (!slot_is(map, slot, SHMQ_RESTORED)) {
			queue_broken(map);
			continue;
		}
		st_release(&s->word, word_next(ld(&s->word), SHMQ_BACK));
		SHMQ_KILLPOINT("restore.back");
		map->requeue[(tail + i) & mask] = slot;
		held_add(map, slot);
	}
	if (SHMQ_PLANTED(5))
		st_release(&q->disk_read, *used == length ? next_position : position + *used);
	st_release(&q->free_head, ld(&q->free_head) + n);
	SHMQ_KILLPOINT("restore.head");
	q->requeue_firsts = tail + n;
	st_release(&q->requeue_tail, tail + n);
	st(&q->disk_depth, ld(&q->disk_depth) > n ? ld(&q->disk_depth) - n : 0);
	bump(&q->restored, n);
	return 0;
}

int shmq_restore(shmq_broker *b, uint32_t queue, const void *data, uint64_t length,
                 uint64_t position, uint64_t next_position, int64_t until, uint32_t *taken,
                 uint64_t *used)
{
	uint64_t *lengths = malloc((length / RECORD_HEAD + 1) * sizeof(uint64_t)), at = 0, size;
	shmq_topic_desc *t;
	shmq_map *map = NULL;
	uint32_t n = 0;
	bool emptied = false;
	int r = lengths ? map_get(b, queue, &map) : SHMQ_NO_MEMORY;

	*taken = 0;
	*used = 0;
	if (r)
		goto out;
	touch(b, queue);
	while (at < length &&
	       record_size((const uint8_t *)data + at, length - at, UINT32_MAX, &size) > 0) {
		lengths[n++] = size - RECORD_HEAD;
		at += size;
	}
	if (at != length) {
		r = because(SHMQ_INVALID, "restore takes whole records only");
		goto out;
	}
	t = topic_of(b, map);
	r = topic_lock(b, t, until);
	if (r)
		goto out;
	r = restore_room(b, map, lengths, &n, until);
	if (!r)
		r = queue_lock_under(b, map, until);
	if (!r) {
		r = restore_some(map, data, length, lengths, n, position, next_position, used);
		emptied = !r && disk_is_empty(map->q);
		queue_unlock(map);
	}
	topic_unlock(t);
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

int shmq_unrestore(shmq_broker *b, uint32_t queue, int64_t until, uint32_t *count)
{
	shmq_map *map;
	shmq_queue_desc *q;
	uint32_t mask, head, at;
	uint64_t position;
	int r = map_get(b, queue, &map);

	*count = 0;
	if (r)
		return r;
	r = queue_lock(b, map, until);
	if (r)
		goto out;
	q = map->q;
	if (lease_has_run(map)) { /* it begins where the read position is */
		queue_unlock(map);
		goto out;
	}
	(void)keep_turns(map);
	mask = ring_mask_of(map);
	head = ld(&q->requeue_head);
	position = ld(&q->disk_read);
	/* Count the longest run at the end of the requeue ring whose records lie right before the read
	 * position. */
	for (at = ld(&q->requeue_tail); at != head; at--) {
		shmq_slot_desc *s = &map->slots[map->requeue[(at - 1) & mask]];

		if (!slot_is(map, map->requeue[(at - 1) & mask], SHMQ_BACK)) {
			queue_broken(map);
			at = ld(&q->requeue_tail);
			break;
		}
		if (s->pos == SHMQ_NO_POSITION || s->previous != SHMQ_FREE || s->pos >> 40 != position >> 40 ||
		    s->pos + s->length + RECORD_HEAD != position)
			break;
		position = s->pos;
	}
	for (uint32_t i = at; i != ld(&q->requeue_tail); i++) {
		shmq_slot_desc *s = &map->slots[map->requeue[i & mask]];

		st_release(&s->word, word_next(ld(&s->word), SHMQ_RESTORED));
		SHMQ_KILLPOINT("unrestore.state");
	}
	*count = ld(&q->requeue_tail) - at;
	if (*count) {
		st_release(&q->disk_read, position);
		SHMQ_KILLPOINT("unrestore.committed");
		bump(&q->disk_depth, *count);
		for (uint32_t i = at, end = ld(&q->requeue_tail); i != end; i++) {
			uint32_t slot = map->requeue[i & mask];

			held_remove(map, slot);
			slot_release(map, slot);
		}
		st_release(&q->requeue_tail, at);
		requeue_firsts_find(map);
	}
	queue_unlock(map);
	if (*count)
		wake_space(b, map);
out:
	map_release(map);
	return r;
}
