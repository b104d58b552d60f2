/*
 * Robust, process-shared mutexes.
 *
 * If a holder dies, the kernel marks the mutex, and the next locker gets SHMQ_LOCK_DIED and HOLDS
 * the lock. It must store that a repair is needed (a `dirty` word) BEFORE lock_consistent, because
 * from then on nobody else learns of the death.
 *
 * One attack remains possible. glibc and musl keep the list of the robust mutexes that a thread holds in
 * the mutexes themselves (__list), so in shared memory. An unlock stores through the two pointers
 * of the list, and the kernel follows them when the thread dies. A process that may write the
 * segment can therefore make a holder store a word of the attacker's choice at any address of the
 * holder's own memory. Comparing the pointers with a private copy right before the unlock would not
 * prevent it: time passes between the comparison and the library's own read, and an attacker that writes
 * in a loop wins. For `life`, which is held for long and where a comparison would help most, there
 * is no valid copy: its pointers change whenever its thread takes another robust mutex, also one of
 * another library or attachment, so an honest process would find differences. And a process that
 * found one could not go on, because the list's head would still point into the mapping. Therefore
 * nothing is compared: every process that may attach is trusted by all others (SECURITY.md).
 */
#ifndef SHMQ_LOCK_H
#define SHMQ_LOCK_H

#include "memory/layout.h"

#include <stdbool.h>

#define SHMQ_LOCK_DIED 1

int lock_init(shmq_lock_desc *lock);
/* Lock, waiting up to `until` (CLOCK_MONOTONIC ns; 0: try once). Returns 0 or SHMQ_LOCK_DIED with
 * the lock held; SHMQ_AGAIN: another thread holds it; SHMQ_CORRUPT. */
int lock_take(shmq_lock_desc *lock, int64_t until);
void lock_consistent(shmq_lock_desc *lock);
/* Unlock. Returns false if this thread does not hold it; the lock then stays as it is. */
bool lock_drop(shmq_lock_desc *lock);

#endif
