/*
 * An exhaustive scheduler for the core, within bounds.
 *
 * Actors (each a process of its own to the core) are coroutines in one thread; every access to
 * shared memory is a point. A run is told by its deviations from "the first actor goes on until it
 * ends or waits": at point n switch to another actor, die, or keep the store back in the store
 * buffer (x86's: it comes after later loads, not after a locked instruction). The search tries
 * every set of deviations within the bounds, each in a run of its own from the same beginning.
 *
 * A switch matters only where the memory accessed is written by one actor and accessed by another;
 * which that is grows while searching, and a search in which it grew is made again. (Plain members
 * of slots and ring entries are no points: they are published by the atomics beside them. Deaths
 * between plain stores are the business of the kill at every instruction.)
 */
#include "scheduler.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>

enum fault schedule_fault;
uint32_t schedule_fault_at;

/* ---- actors ---- */

#define STACK (256u << 10)

struct actor actors[ACTORS];
static ucontext_t explorer;
uint32_t me = OUTSIDE;
bool running;
const scenario *current;
static jmp_buf failed;
char failure[256];

void schedule_as(uint32_t actor)
{
	me = actor;
}

bool schedule_is_dead(uint32_t actor)
{
	return actors[actor].is == DEAD;
}

void schedule_fail(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(failure, sizeof(failure), format, args);
	va_end(args);
	if (!current) {
		fprintf(stderr, "schedule: %s\n", failure);
		abort();
	}
	if (running)
		setcontext(&explorer);
	longjmp(failed, 1);
}

/* ---- points, and what is chosen there ---- */

deviation plan[DEVIATIONS];
static uint32_t planned, followed;
uint32_t point;
uint64_t deaths;
alternatives trace[POINTS];

/* For each 8 bytes of memory, the actors that read and that wrote it. Open addressing. */
#define TOUCHED (1u << 20)

static struct touched {
	uintptr_t at;
	uint8_t readers, writers;
} touched[TOUCHED];

bool conflicts_grew;

void conflicts_forget(void)
{
	memset(touched, 0, sizeof(touched));
}

static bool is_contended(const struct touched *t)
{
	return t->writers && ((t->readers | t->writers) & ((t->readers | t->writers) - 1));
}

static bool contended(const volatile void *at, bool writes)
{
	uintptr_t key = (uintptr_t)at / 8;
	struct touched *t = &touched[key * 0x9e3779b97f4a7c15u >> 44 & (TOUCHED - 1)];
	bool before;

	while (t->at && t->at != key)
		if (++t == touched + TOUCHED)
			t = touched;
	t->at = key;
	before = is_contended(t);
	*(writes ? &t->writers : &t->readers) |= (uint8_t)(1u << me);
	if (is_contended(t) && !before)
		conflicts_grew = true;
	return is_contended(t);
}

static uint8_t others_that_go_on(void)
{
	uint8_t to = 0;

	for (uint32_t i = 0; i < ACTORS; i++)
		if (i != me && actors[i].is == GOES_ON)
			to |= (uint8_t)(1u << i);
	return to;
}

static void flush_buffer(struct actor *a)
{
	for (uint32_t i = 0; i < a->buffered; i++)
		memcpy((void *)(uintptr_t)a->buffer[i].at, &a->buffer[i].value, a->buffer[i].size);
	a->buffered = 0;
	a->delaying = false;
}

void schedule_drain(void)
{
	if (running && (schedule_fault != FAULT_NO_FENCE))
		flush_buffer(&actors[me]);
}

static void go_on_with(uint32_t actor)
{
	uint32_t from = me;

	me = actor;
	swapcontext(&actors[from].context, &actors[actor].context);
}

static void next_actor(void);

/* The actor ends here, as by SIGKILL: its stores are made, its locks are marked. */
static _Noreturn void die(void)
{
	flush_buffer(&actors[me]);
	actors[me].is = DEAD;
	deaths++;
	locks_die(me);
	next_actor();
	abort();
}

void schedule_kill(uint32_t actor)
{
	actors[actor].killed = true;
	locks_die(actor);
}

static deviation *planned_here(void)
{
	point++;
	if (point >= POINTS)
		schedule_fail("a run does not end");
	return followed < planned && plan[followed].point == point ? &plan[followed++] : NULL;
}

static bool point_here(const volatile void *at, bool writes)
{
	bool matters = contended(at, writes), delayed = false;
	deviation *d = planned_here();

	trace[point] = (alternatives){
		.to = matters ? others_that_go_on() : 0, .store = writes, .dies = writes};
	if (!d)
		return false;
	switch (d->what) {
	case DIE:
		die();
	case DELAY:
		actors[me].delaying = delayed = true;
		break;
	default:
		go_on_with(d->to);
	}
	return delayed;
}

void schedule_access(const volatile void *at, bool writes)
{
	if (running)
		(void)point_here(at, writes);
}

bool schedule_forwarded(const volatile void *at, void *value, size_t size)
{
	if (!running)
		return false;
	for (uint32_t i = actors[me].buffered; i--;)
		if (actors[me].buffer[i].at == at) {
			memcpy(value, &actors[me].buffer[i].value, size);
			return true;
		}
	return false;
}

void schedule_store(volatile void *at, const void *value, size_t size)
{
	static uint32_t stores;
	struct actor *a = &actors[me];

	if (!running) {
		memcpy((void *)(uintptr_t)at, value, size);
		stores = 0;
		return;
	}
	(void)point_here(at, true);
	if (schedule_fault == FAULT_LOST_STORE && ++stores == schedule_fault_at)
		return;
	if (!a->delaying || a->buffered == BUFFERED) {
		flush_buffer(a);
		memcpy((void *)(uintptr_t)at, value, size);
		return;
	}
	a->buffer[a->buffered].at = at;
	a->buffer[a->buffered].size = size;
	memcpy(&a->buffer[a->buffered++].value, value, size);
}

/* me cannot go on. Back to the explorer when nobody can. */
static void next_actor(void)
{
	uint32_t from = me;
	uint8_t to = others_that_go_on();
	deviation *d;

	if (!to) {
		me = OUTSIDE;
		if (actors[from].is == ENDED || actors[from].is == DEAD)
			setcontext(&explorer);
		swapcontext(&actors[from].context, &explorer);
		return;
	}
	d = planned_here();
	trace[point] = (alternatives){.to = to & (uint8_t)(to - 1), .forced = true};
	me = d ? d->to : (uint32_t)__builtin_ctz(to);
	if (actors[from].is == ENDED || actors[from].is == DEAD)
		setcontext(&actors[me].context);
	swapcontext(&actors[from].context, &actors[me].context);
}

void wait_for(enum condition why, const void *what)
{
	flush_buffer(&actors[me]);
	actors[me].is = why;
	actors[me].waits_for = what;
	next_actor();
}

static void actor_main(void)
{
	current->act[me]();
	if (actors[me].buffered) { /* its stores may stay in the buffer for a while yet */
		deviation *d = planned_here();

		trace[point] = (alternatives){.to = others_that_go_on()};
		if (d)
			go_on_with(d->to);
	}
	flush_buffer(&actors[me]);
	actors[me].is = ENDED;
	next_actor();
}

/* ---- a run ---- */

static bool anyone(enum condition is)
{
	for (uint32_t i = 0; i < ACTORS; i++)
		if (actors[i].is == is)
			return true;
	return false;
}

static uint32_t dead(void)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < ACTORS; i++)
		n += actors[i].is == DEAD && !actors[i].killed;
	return n;
}

/* Let them go on from `first` until nobody can. */
static void go(uint32_t first)
{
	volatile bool back = false;

	me = first;
	running = true;
	getcontext(&explorer);
	if (!back) {
		back = true;
		setcontext(&actors[first].context);
	}
	running = false;
	me = OUTSIDE;
}

static bool go_all(void)
{
	bool went = false;

	for (uint32_t i = 0; i < ACTORS && !*failure; i++)
		if (actors[i].is == GOES_ON) {
			go(i);
			went = true;
		}
	return went;
}

static void check_sleepers(void)
{
	for (uint32_t i = 0; i < ACTORS; i++)
		if (actors[i].is == WAITS_FOR_RING && current->asleep && !current->asleep(i))
			schedule_fail("actor %u sleeps, and there is something to do for it", i);
}

/* Nobody can go on: deadlock, sleep, or the end. */
static void rounds(void)
{
	uint32_t settled = 0; /* how many deaths were */

	while (go_all() || anyone(PAUSES) || anyone(WAITS_FOR_RING) || anyone(WAITS_FOR_LOCK)) {
		if (*failure)
			return;
		if (anyone(GOES_ON))
			continue;
		if (anyone(PAUSES)) {
			for (uint32_t i = 0; i < ACTORS; i++)
				if (actors[i].is == PAUSES)
					actors[i].is = GOES_ON;
			continue;
		}
		if (anyone(WAITS_FOR_LOCK)) {
			schedule_fail("everybody waits for a lock");
		}
		if (dead() > settled) {
			settled = dead();
			current->settle();
			continue;
		}
		check_sleepers();
		for (uint32_t i = 0; i < ACTORS; i++)
			if (actors[i].is == WAITS_FOR_RING) {
				actors[i].timed_out = true;
				actors[i].is = GOES_ON;
			}
	}
	if (dead() > settled)
		current->settle();
}

bool run(uint32_t n)
{
	memory_restore();
	planned = n;
	followed = point = 0;
	locks_begin();
	failure[0] = 0;
	for (uint32_t i = 0; i < ACTORS; i++) {
		struct actor *a = &actors[i];

		if (!a->stack)
			a->stack = malloc(STACK);
		a->is = a->killed ? DEAD : current->act[i] ? GOES_ON : ENDED;
		a->buffered = 0;
		a->delaying = a->timed_out = false;
		getcontext(&a->context);
		a->context.uc_stack.ss_sp = a->stack;
		a->context.uc_stack.ss_size = STACK;
		a->context.uc_link = NULL;
		makecontext(&a->context, actor_main, 0);
	}
	if (!setjmp(failed)) {
		rounds();
		if (!*failure)
			current->verify();
	}
	running = false;
	me = OUTSIDE;
	return !*failure;
}
