/*
 * Whoever maps a segment can scribble in it. So an index, an offset or a length that was read from
 * shared memory goes through one comparison before it is used, and what cannot be right makes the
 * queue dirty: what is derived is then made anew, and what is not is SHMQ_CORRUPT.
 */
#ifndef SHMQ_SANE_H
#define SHMQ_SANE_H

#ifdef SHMQ_TRUSTING /* for the test that shows that the comparisons are needed */
#define SANE(condition) ((void)(condition), 1)
#else
#define SANE(condition) __builtin_expect(!!(condition), 1)
#endif

/* A plain field of shared memory, read once: whoever writes it meanwhile cannot make a check see
 * one value and what follows it another. */
#define once(field) (*(const volatile __typeof__(field) *)&(field))

#endif
