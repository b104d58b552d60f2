/* Room for messages. Under the publish lock (P). */
#ifndef SHMQ_ROOM_H
#define SHMQ_ROOM_H

#include "memory/handles.h"

/* The longest body: a block's size has 32 bits. */
#define MOST_BODY (UINT32_MAX - 2 * SHMQ_ARENA_UNIT)
enum purpose { FOR_READY, FOR_DEFERRED, FOR_RESTORE };

/* Take both locks (P and D) for a restore, and set *n to how many of the messages the budget and the
 * arena have room for. SHMQ_EMPTY: for none of them. */
int restore_lock(shmq_broker *b, shmq_map *map, const uint64_t *lengths, uint32_t *n,
                 int64_t until);
/* A lower bound for the number of messages in the ready ring; exact if it is above `enough`. P
 * is held. */
uint32_t ready_count_cached(shmq_queue_desc *q, uint32_t enough);
/* Returns 0, or SHMQ_TOO_BIG: the queue's memory could never hold n bodies of these lengths. */
int room_ever(const shmq_map *map, const uint64_t *lengths, uint32_t n, enum purpose purpose);
/* Make sure that the next n free slots exist and have bodies for `lengths`, within the budget of
 * this purpose; a dirty queue is repaired first. Returns as queue_room. P is held. */
int room_for(shmq_broker *b, shmq_map *map, const uint64_t *lengths, uint32_t n,
             enum purpose purpose, int64_t until);
/* Returns 0 if the limits of the queue allow n more messages of `bytes` in all; SHMQ_FULL: not now;
 * SHMQ_TOO_BIG: never. P is held. */
int limit_check(const shmq_broker *b, shmq_map *map, uint32_t n, uint64_t bytes);
/* Drop the oldest READY messages: as many as the limits demand before n messages of `bytes` may
 * come, and at least `more`. dropped: their number. P is held; takes D. */
int drop_oldest(shmq_broker *b, shmq_map *map, uint32_t n, uint64_t bytes, uint32_t more,
                int64_t until, uint32_t *dropped);
/* Make sure, for a restore, that the next n free slots exist and have bodies for `lengths`. Returns
 * 0, SHMQ_FULL, SHMQ_TOO_BIG or SHMQ_AGAIN. Moves no head; may take D to grow. */
int queue_room(shmq_broker *b, shmq_map *map, const uint64_t *lengths, uint32_t n, int64_t until);

#endif
