/*
 * Robust, process-shared mutexes.
 *
 * A death while one is held: the kernel marks it, the next locker gets SHMQ_LOCK_DIED and HOLDS the
 * lock; it must note what has to be repaired (a `dirty` word) BEFORE lock_consistent, because from
 * then on nobody else learns of the death.
 *
 * One thing this cannot guard against: glibc keeps the list of the robust mutexes that a thread
 * holds in the mutexes themselves (__list), so in shared memory. To unlock one stores through its two
 * pointers, and the kernel follows them when the thread dies. Whoever may write the segment can
 * have a holder store a word of his choice at an address of his choice, in the holder's own memory.
 * A comparison of the pointers with a private copy right before the unlock would not end that:
 * between it and glibc's own reading lies time, and an attacker who writes in a loop wins. Nor is
 * there a copy to compare with where it would help, for `life`, which is held for long: its
 * pointers rightly change while it is held, with each robust mutex that its thread takes, those of
 * other libraries and other attachments too, so an honest process would find differences. And a
 * process that found one could not go on: the list's head would keep pointing into the mapping.
 * Therefore nothing is compared: who may attach is trusted with the processes that do
 * (SECURITY.md).
 */
#ifndef SHMQ_LOCK_H
#define SHMQ_LOCK_H

#include "layout.h"

#include <stdbool.h>

#define SHMQ_LOCK_DIED 1

int lock_init(shmq_lock_desc *lock);
/* 0, SHMQ_LOCK_DIED, SHMQ_AGAIN (held elsewhere until `until`; 0: tried once), SHMQ_CORRUPT. */
int lock_take(shmq_lock_desc *lock, int64_t until);
void lock_consistent(shmq_lock_desc *lock);
/* Unlock. Returns false, and the lock stays held, in a thread that does not hold it. */
bool lock_drop(shmq_lock_desc *lock);

#endif
