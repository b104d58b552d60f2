/* Room for messages. Under the publish lock (P). */
#ifndef SHMQ_ROOM_H
#define SHMQ_ROOM_H

#include "handles.h"

/* The longest body: a block's size has 32 bits. */
#define MOST_BODY (UINT32_MAX - 2 * SHMQ_ARENA_UNIT)
enum purpose { FOR_READY, FOR_DEFERRED, FOR_RESTORE };

/* Set *n to how many of the messages the budget and the arena have room for, or return
 * SHMQ_EMPTY. P is held. */
int restore_room(shmq_broker *b, shmq_map *map, const uint64_t *lengths, uint32_t *n,
                 int64_t until);
/* A lower bound for the number of messages in the ready ring; exact if it is above `enough`. P
 * is held. */
uint32_t ready_count_cached(shmq_queue_desc *q, uint32_t enough);
/* Make sure that the next n free slots exist and have bodies for `lengths`, within the budget of
 * this purpose; a dirty queue is repaired first. Returns as queue_room. P is held. */
int room_for(shmq_broker *b, shmq_map *map, const uint64_t *lengths, uint32_t n,
             enum purpose purpose, int64_t until);
/* Make sure, for a restore, that the next n free slots exist and have bodies for `lengths`. Returns
 * 0, SHMQ_FULL, SHMQ_TOO_BIG or SHMQ_AGAIN. Moves no head; may take D to grow. */
int queue_room(shmq_broker *b, shmq_map *map, const uint64_t *lengths, uint32_t n, int64_t until);

#endif
