/* Doorbells and waiters' bitmaps; doorbell.c has the rules. */
#ifndef SHMQ_DOORBELL_H
#define SHMQ_DOORBELL_H

#include "base/atomics.h"
#include "memory/handles.h"
#include "shmq_supervisor.h"

#define WAKE_ALL UINT32_MAX

int bell_get(shmq_broker *b, uint32_t *bell);
/* Discard the doorbell's pending rings. Look for their cause after this call. */
void bell_drain(shmq_broker *b, uint32_t bell);
void bell_put(shmq_broker *b, uint32_t bell);
/* Note how many messages a consumer found after a sleep: that tells a stream from questions and
 * answers. */
void bell_gathered(uint32_t messages);
/* Wait on `bell`, first spinning if that paid off lately, until `deadline` or for `slice` ns.
 * Returns 0 if it was rung or the slice is over; SHMQ_TIMEOUT, SHMQ_INTERRUPTED. slept: it did not
 * only spin. */
int bell_wait(shmq_broker *b, uint32_t bell, int64_t deadline, int64_t slice, bool *slept);
/* The same, without spinning on the doorbell first. */
int bell_sleep(shmq_broker *b, uint32_t bell, int64_t deadline, int64_t slice);
/* Sleep `pause` ns instead, because the table of waiters is full. Returns 0, SHMQ_INTERRUPTED, or
 * SHMQ_TIMEOUT: the deadline is over. */
int bell_none(int64_t deadline, int64_t pause);
void bell_ring(shmq_broker *b, uint32_t bell);
/* Until bell_caught, a wake-up by this thread that picks `bell` notes the queue and posts nothing:
 * shmq_waiter_catch. Only for a plain waiter for messages. */
void bell_catch(const shmq_broker *b, uint32_t bell);
uint32_t bell_caught(uint32_t *queues);
/* Ring, whatever for: one that waits for many queues looks at all of them. */
void bell_alarm(shmq_broker *b, uint32_t bell);
/* Ring if it wants to hear of names that come or go. */
void bell_names(shmq_broker *b, uint32_t bell);
/* Make it a waiter for one queue at a time, as all are at first. */
void bell_plain(shmq_waiter_desc *waiter);
/* Leave a bit, which the next wake-up clears. Look again after this call. */
void wait_announce(shmq_waitset_desc *w, uint32_t bell);
void wait_withdraw(shmq_waitset_desc *w, uint32_t bell);
static inline bool wait_is_announced(shmq_waitset_desc *w, uint32_t bell)
{
	return ld(&w->words[bell / 64]) >> bell % 64 & 1;
}
/* Wake up to n waiters, in rotation. Call it after the store that they wait for; it needs no
 * lock. */
void wait_wake(shmq_broker *b, shmq_waitset_desc *w, uint32_t n);
/* Ring the supervisor for these reasons: bits of enum shmq_ring. */
void supervisor_ring(shmq_broker *b, uint32_t why);
/* Mark a queue for the spiller (under any lock), and ring the spiller. */
void spiller_note(shmq_broker *b, uint32_t index);
void spiller_ring(shmq_broker *b, uint32_t index);
/* Ring the scanner if a queue's deadline or due time is before the time until which it sleeps. */
void scanner_ring(shmq_broker *b, int64_t deadline, int64_t due);

#endif
