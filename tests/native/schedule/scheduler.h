/*
 * Inside the scheduler: memory.c (what a run begins with), locks.c (locks and doorbells), actors.c
 * (a run, told by its deviations) and search.c (all runs within bounds).
 */
#ifndef SCHEDULER_H
#define SCHEDULER_H

#include "schedule.h"

#undef malloc
#undef calloc
#undef free
#undef mmap
#undef munmap
#undef clock_gettime

#include "base/clock.h"
#include "base/process.h"
#include "memory/handles.h"
#include "sync/doorbell.h"
#include "sync/lock.h"

#include <ucontext.h>

#define BUFFERED 64
#define DEVIATIONS 8
#define POINTS 200000u

enum condition { GOES_ON, WAITS_FOR_LOCK, WAITS_FOR_RING, PAUSES, ENDED, DEAD };

struct actor {
	ucontext_t context;
	uint8_t *stack;
	enum condition is;
	const void *waits_for;
	bool timed_out;
	struct buffered {
		volatile void *at;
		uint64_t value;
		size_t size;
	} buffer[BUFFERED];
	uint32_t buffered;
	bool delaying, killed;
};

extern struct actor actors[ACTORS];
extern uint32_t me; /* the actor that runs; OUTSIDE: none */
extern bool running;
extern const scenario *current;
extern char failure[256]; /* of this run; "": none so far */

/* ---- memory.c ---- */

extern int64_t ticks; /* microseconds */
void memory_restore(void);
void memory_forget(void);

/* ---- locks.c ---- */

void locks_begin(void);
void locks_forget(void);
/* Marks the locks of an actor that died, as the kernel would. */
void locks_die(uint32_t actor);

/* ---- actors.c ---- */

enum choice { SWITCH, DIE, DELAY };

typedef struct deviation {
	uint32_t point;
	uint8_t what, to;
} deviation;

/* The possible deviations at a point: bits of the actors to switch to; whether it is a store. */
typedef struct alternatives {
	uint8_t to;
	bool forced; /* the actor cannot go on: any of them is as good */
	bool store, dies;
} alternatives;

/* The deviations of the next run, in the order of their points. */
extern deviation plan[DEVIATIONS];
/* The possible deviations at each point of the last run; it had `point` points. */
extern alternatives trace[POINTS];
extern uint32_t point;
extern uint64_t deaths;
/* Whether the last runs found memory that several actors access and that was not known as such. */
extern bool conflicts_grew;
void conflicts_forget(void);
/* One run with the first n deviations of the plan. False: `failure` says why. */
bool run(uint32_t n);
/* The actor cannot go on until somebody changes its condition. */
void wait_for(enum condition why, const void *what);

#endif
