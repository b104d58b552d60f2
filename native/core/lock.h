/*
 * Robust, process-shared mutexes.
 *
 * A death while one is held: the kernel marks it, the next locker gets SHMQ_LOCK_DIED and HOLDS the
 * lock; it must note what has to be repaired (a `dirty` word) BEFORE lock_consistent, because from
 * then on nobody else learns of the death.
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
void lock_drop(shmq_lock_desc *lock);

#endif
