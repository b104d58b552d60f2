/* The handle of a thread that waits with one doorbell; waiter.c has the rules. */
#ifndef SHMQ_WAITER_H
#define SHMQ_WAITER_H

#include "memory/handles.h"

struct shmq_waiter {
	shmq_broker *b;
	_Atomic uint32_t bell; /* SHMQ_NONE: the table was full, poll */
	_Atomic bool woken;    /* set by shmq_waiter_wake, cleared by the wait that it ends */
	_Atomic bool closed;
};

/* Its doorbell. SHMQ_NONE: there is none free. */
uint32_t waiter_bell(shmq_waiter *w);

#endif
