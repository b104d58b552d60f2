/* The lanes of one consumer of many queues: which may have something, and which is next. Private to
 * lanes.c; everything here is under its `mutex`. */
#ifndef SHMQ_LANE_H
#define SHMQ_LANE_H

#include "memory/handles.h"

typedef struct level level;

typedef struct lane {
	shmq_consumer *c;
	void *tag;
	level *level;
	uint32_t place;    /* in its level */
	uint32_t users;    /* threads that take from it just now */
	bool removed;      /* the last user frees it */
	bool holds;        /* is in `holders` */
	uint64_t refused;  /* the round in which its lock was held elsewhere */
	struct lane *next; /* another one with the same hint */
} lane;

struct level {
	lane **lanes;
	uint64_t *active; /* one bit for each lane */
	uint32_t count, room;
	uint32_t first;        /* whose turn it is */
	uint64_t pass, stride; /* where it stands in the sharing, and how far one message moves it */
};

struct shmq_lanes {
	shmq_broker *b;
	pthread_mutex_t mutex;
	pthread_cond_t awake;  /* nobody sleeps on the doorbell any more */
	_Atomic uint32_t bell; /* SHMQ_NONE: the table of waiters was full */
	_Atomic bool closed;
	_Atomic bool woken;   /* by shmq_lanes_wake, for the wait that it ends */
	_Atomic bool limited; /* a thread waits until fewer messages are in flight */
	bool sleeping;        /* a thread is on the doorbell; others wait for it */
	bool owed;            /* a ring counted on this consumer since it last took something */
	bool strict, follows;
	uint32_t max_in_flight;
	uint32_t levels_count;
	level *levels;
	lane *by_hint[SHMQ_HINTS];
	lane **holders; /* lanes that may have messages in flight */
	uint32_t holders_count, holders_room;
	uint64_t held;     /* messages in flight, at most */
	uint64_t reserved; /* of them: for takes that are going on */
	uint64_t time;     /* the pass of the level that was served last, before that */
	uint64_t round;    /* number of the present attempt to take */
	int64_t looked;    /* when all lanes were last made active */
};

static inline shmq_waitset_desc *takers_of(const lane *x)
{
	return &x->c->map->q->takers;
}

/* A message moves its level by SHARES / weight. Divisible by 1 to 24, so that usual weights are
 * exact. */
#define SHARES UINT64_C(5354228880)

/* The first active lane from `at` on, without turning round; `count` if there is none. */
uint32_t active_from(const level *v, uint32_t at);
void lane_activate(lane *x);
void lanes_activate_all(shmq_lanes *l);
/* Take the hints, and make their lanes active. */
void lanes_collect(shmq_lanes *l);
/* The lane that is next, or NULL. Those that were active and have nothing become quiet. */
lane *lanes_choose(const shmq_lanes *l);
/* `got` messages were taken from the lane. */
void lanes_served(shmq_lanes *l, lane *x, uint32_t got);
/* How many messages may be taken, up to n. */
uint32_t lanes_room(shmq_lanes *l, uint32_t n);
/* Note that a lane may have messages in flight. Returns false if there is no memory. */
bool lane_hold(shmq_lanes *l, lane *x);
/* Make room for one more lane. Returns false if there is no memory. */
bool level_grow(level *v);
/* Remove a lane; those behind it move up. */
void level_leave(lane *x);

#endif
