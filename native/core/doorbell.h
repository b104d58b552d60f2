/* Doorbells and waiters' bitmaps; doorbell.c has the rules. */
#ifndef SHMQ_DOORBELL_H
#define SHMQ_DOORBELL_H

#include "handles.h"

#define WAKE_ALL UINT32_MAX
#define RING_REQUEST 1u
#define RING_SPILLER 2u
#define RING_LEFT 4u
#define RING_CHANGED 8u
#define RING_DEADLINE 16u

int bell_get(shmq_broker *b, uint32_t *bell);
/* Discard its pending rings. Look for their cause after this call. */
void bell_drain(shmq_broker *b, uint32_t bell);
void bell_put(shmq_broker *b, uint32_t bell);
/* Note how many messages a consumer found after a sleep: that tells a stream from questions and
 * answers. */
void bell_gathered(uint32_t messages);
/* Sleep on `bell`. Returns 0 if it was rung or the slice of 1 s is over; SHMQ_TIMEOUT,
 * SHMQ_INTERRUPTED. */
int bell_wait(shmq_broker *b, uint32_t bell, int64_t deadline, int64_t slice, bool *slept);
/* The same, without spinning on the doorbell first. */
int bell_sleep(shmq_broker *b, uint32_t bell, int64_t deadline, int64_t slice);
void bell_ring(shmq_broker *b, uint32_t bell);
void wait_announce(shmq_waitset_desc *w, uint32_t bell);
void wait_withdraw(shmq_waitset_desc *w, uint32_t bell);
/* Wake up to n waiters, in rotation. Call it after the store that they wait for; it needs no
 * lock. */
void wait_wake(shmq_broker *b, shmq_waitset_desc *w, uint32_t n);
void supervisor_ring(shmq_broker *b, uint32_t why);
/* Mark a queue for the spiller (under any lock), and ring the spiller. */
void attend(shmq_broker *b, uint32_t index);
void spiller_ring(shmq_broker *b, uint32_t index);
/* Ring the scanner if a queue's deadline or due time is before the time until which it sleeps. */
void scanner_ring(shmq_broker *b, int64_t deadline, int64_t due);

#endif
