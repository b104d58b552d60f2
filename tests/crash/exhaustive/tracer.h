/*
 * A process of ours, one instruction at a time. It counts only between watch_begin and watch_end;
 * in between (the ledger, the buffers) it runs free.
 */
#ifndef TRACER_H
#define TRACER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

typedef struct tracee {
	pid_t pid;
	uint64_t count; /* instructions done */
	bool entered;   /* this one is the first of a call */
	bool complete;  /* the operation has ended; the process still stands there */
	bool failed;    /* it ended by itself: status */
	int status;
} tracee;

/* A child that runs `act`, stopped before the first instruction that is watched, or complete. */
void tracee_start(tracee *t, void (*act)(void *), void *argument);
/* One instruction. False: there was none left. */
bool tracee_step(tracee *t);
/*
 * Run on until it is for the n-th time about to execute the instruction at `address` (watched ones
 * only), by a breakpoint register: a thousand times faster than stepping. False where there are
 * none.
 */
bool tracee_run_to(tracee *t, uint64_t address, uint64_t nth);
/* SIGKILL it, now. */
void tracee_kill(tracee *t);
/* Address of its next instruction. */
uint64_t tracee_at(const tracee *t);

#endif
