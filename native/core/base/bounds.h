/*
 * Any process that maps a segment can scribble in it. So an index, an offset or a length that was
 * read from shared memory goes through one comparison before it is used. An impossible value makes
 * the queue dirty: derived state is then rebuilt, and damage to other state is SHMQ_CORRUPT.
 */
#ifndef SHMQ_BOUNDS_H
#define SHMQ_BOUNDS_H

#define TRUST_CHECK(condition) __builtin_expect(!!(condition), 1)

/* Read a plain field of shared memory exactly once. A process that writes it meanwhile cannot make
 * a check see one value and the code after the check another. */
#define once(field) (*(const volatile __typeof__(field) *)&(field))

#endif
