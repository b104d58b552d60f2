/*
 * An exhaustive scheduler for the core, within bounds.
 *
 * Actors (each a process of its own to the core) are coroutines in one thread; every access to
 * shared memory is a point. A run is told by its deviations from "the first actor goes on until it
 * ends or waits": at point n switch to another actor, die, or keep the store back in the store
 * buffer (x86's: it comes after later loads, not after a locked instruction). The search tries every
 * set of deviations within the bounds, each in a run of its own from the same beginning.
 *
 * A switch matters only where the memory accessed is written by one actor and accessed by another;
 * which that is grows while searching, and a search in which it grew is made again. (Plain members
 * of slots and ring entries are no points: they are published by the atomics beside them. Deaths
 * between plain stores are the business of the kill at every instruction.)
 */
#include "schedule.h"

#undef malloc
#undef calloc
#undef free
#undef mmap
#undef munmap
#undef clock_gettime

#include "clock.h"
#include "doorbell.h"
#include "handles.h"
#include "lock.h"
#include "process.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/stat.h>
#include <ucontext.h>
#include <unistd.h>

enum plant schedule_plant;
uint32_t schedule_plant_at;

/* ---- memory: segments and heap, put back before every run ---- */

#define HEAP (8u << 20)
#define PAGE 4096u
#define SEGMENTS 16

static struct segment {
	uint8_t *base;
	size_t size;
	dev_t device;
	ino_t inode;
} segments[SEGMENTS];
static uint32_t segment_count;

static uint8_t heap_memory[HEAP] __attribute__((aligned(PAGE)));
static size_t heap_used;

static struct page {
	uint8_t *at, *copy;
} *pages;
static size_t page_count, heap_begin;
static int64_t ticks, ticks_begin;

void *schedule_alloc(size_t size)
{
	void *p = heap_memory + heap_used;

	heap_used += (size + 63) / 64 * 64;
	if (heap_used > HEAP)
		schedule_fail("the test's heap is too small");
	memset(p, 0, size);
	return p;
}

/* The same place for everybody, so that an address says what is accessed. */
void *schedule_map(size_t size, int fd)
{
	struct stat s;

	if (fstat(fd, &s))
		return MAP_FAILED;
	for (uint32_t i = 0; i < segment_count; i++)
		if (segments[i].device == s.st_dev && segments[i].inode == s.st_ino)
			return segments[i].base;
	if (segment_count == SEGMENTS)
		return MAP_FAILED;
	segments[segment_count] = (struct segment){
	        mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), size, s.st_dev, s.st_ino};
	return segments[segment_count++].base;
}

static void keep(uint8_t *at)
{
	pages = realloc(pages, (page_count + 1) * sizeof(*pages));
	pages[page_count].at = at;
	pages[page_count].copy = malloc(PAGE);
	memcpy(pages[page_count++].copy, at, PAGE);
}

static void pages_forget(void)
{
	for (size_t i = 0; i < page_count; i++)
		free(pages[i].copy);
	page_count = 0;
}

void schedule_begin(void)
{
	for (uint32_t i = 0; i < segment_count; i++) {
		size_t n = segments[i].size / PAGE;
		unsigned char *resident = malloc(n);

		if (mincore(segments[i].base, segments[i].size, resident))
			abort();
		for (size_t p = 0; p < n; p++)
			if (resident[p] & 1)
				keep(segments[i].base + p * PAGE);
		free(resident);
	}
	for (size_t at = 0; at < heap_used; at += PAGE)
		keep(heap_memory + at);
	heap_begin = heap_used;
	ticks_begin = ticks;
}

static void begin_again(void)
{
	for (size_t i = 0; i < page_count; i++)
		memcpy(pages[i].at, pages[i].copy, PAGE);
	heap_used = heap_begin;
	ticks = ticks_begin;
}

/* ---- time passes by being asked for ---- */

int schedule_clock(clockid_t clock, struct timespec *t)
{
	int64_t ns = (clock == CLOCK_REALTIME ? INT64_C(1781000000) : INT64_C(1000)) * NS_PER_S +
	             ++ticks * 1000;

	*t = timespec_of(ns);
	return 0;
}

/* ---- actors ---- */

#define STACK (256u << 10)
#define BUFFERED 64
#define HELD 16

enum condition { GOES_ON, WAITS_FOR_LOCK, WAITS_FOR_RING, PAUSES, ENDED, DEAD };

static struct actor {
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
} actors[ACTORS];
static ucontext_t explorer;
static uint32_t me = OUTSIDE;
static bool running;
static const scenario *current;
static jmp_buf failed;
static char failure[256];

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

/* ---- locks: the first word is the holder's number + 1, the second says that it died ---- */

struct lock_words {
	uint32_t holder, died;
};

static const void *locks[4096];
static uint32_t lock_count;

static struct lock_words *words_of(shmq_lock_desc *lock)
{
	return (struct lock_words *)(void *)lock;
}

int lock_init(shmq_lock_desc *lock)
{
	*words_of(lock) = (struct lock_words){0, 0};
	return 0;
}

static void note_lock(const void *lock)
{
	for (uint32_t i = 0; i < lock_count; i++)
		if (locks[i] == lock)
			return;
	locks[lock_count++] = lock;
}

static void wait_for(enum condition why, const void *what);

int lock_take(shmq_lock_desc *lock, int64_t until)
{
	struct lock_words *w = words_of(lock);

	schedule_drain();
	schedule_access(lock, true);
	while (w->holder && schedule_plant != PLANT_NO_LOCK) {
		if (!until)
			return SHMQ_AGAIN;
		if (!running || w->holder == me + 1)
			schedule_fail("actor %u waits for ever for a lock of actor %u", me, w->holder - 1);
		wait_for(WAITS_FOR_LOCK, lock);
	}
	if (w->died == 2)
		return SHMQ_CORRUPT;
	w->holder = me + 1;
	note_lock(lock);
	return w->died ? SHMQ_LOCK_DIED : 0;
}

void lock_consistent(shmq_lock_desc *lock)
{
	schedule_drain();
	schedule_access(lock, true);
	words_of(lock)->died = 0;
}

bool lock_drop(shmq_lock_desc *lock)
{
	struct lock_words *w = words_of(lock);

	schedule_drain();
	schedule_access(lock, true);
	if (w->died)
		w->died = 2; /* ENOTRECOVERABLE from now on */
	w->holder = 0;
	for (uint32_t i = 0; i < ACTORS; i++)
		if (actors[i].is == WAITS_FOR_LOCK && actors[i].waits_for == lock)
			actors[i].is = GOES_ON;
	return true;
}

static void locks_die(uint32_t actor)
{
	for (uint32_t i = 0; i < lock_count; i++) {
		struct lock_words *w = (struct lock_words *)(uintptr_t)locks[i];

		if (w->holder != actor + 1)
			continue;
		w->holder = 0;
		w->died = schedule_plant == PLANT_NO_OWNER_DIED ? 0 : 1;
		for (uint32_t k = 0; k < ACTORS; k++)
			if (actors[k].is == WAITS_FOR_LOCK && actors[k].waits_for == w)
				actors[k].is = GOES_ON;
	}
}

/* ---- doorbells: the first word counts ---- */

static uint32_t posts;

int schedule_sem_init(sem_t *sem, unsigned value)
{
	memset(sem, 0, sizeof(*sem));
	*(uint32_t *)(void *)sem = value;
	return 0;
}

int schedule_sem_post(sem_t *sem)
{
	schedule_drain();
	schedule_access(sem, true);
	if (schedule_plant == PLANT_LOST_POST && running && posts++ % 2 == 0)
		return 0;
	++*(uint32_t *)(void *)sem;
	for (uint32_t i = 0; i < ACTORS; i++)
		if (actors[i].is == WAITS_FOR_RING && actors[i].waits_for == sem)
			actors[i].is = GOES_ON;
	return 0;
}

int schedule_sem_trywait(sem_t *sem)
{
	uint32_t *value = (uint32_t *)(void *)sem;

	schedule_drain();
	if (!*value) /* the same as not having looked */
		return -1;
	schedule_access(sem, true);
	if (!*value)
		return -1;
	--*value;
	return 0;
}

/* Never ends by its time as long as anybody can go on. */
int schedule_sem_wait(sem_t *sem)
{
	uint32_t *value = (uint32_t *)(void *)sem;

	schedule_drain();
	schedule_access(sem, true);
	while (!*value) {
		if (!running)
			schedule_fail("nobody but an actor may wait");
		wait_for(WAITS_FOR_RING, sem);
		if (actors[me].timed_out) {
			actors[me].timed_out = false;
			ticks += 1000000; /* a second */
			errno = ETIMEDOUT;
			return -1;
		}
	}
	--*value;
	return 0;
}

int schedule_pause(void)
{
	if (running)
		wait_for(PAUSES, NULL);
	return 0;
}

/* ---- points, and what is chosen there ---- */

enum choice { SWITCH, DIE, DELAY };

typedef struct deviation {
	uint32_t point;
	uint8_t what, to;
} deviation;

#define DEVIATIONS 8
static deviation plan[DEVIATIONS];
static uint32_t planned, followed, point;
static uint64_t deaths;

/* What may be done otherwise at a point: bits of actors to switch to; whether it is a store. */
typedef struct alternatives {
	uint8_t to;
	bool forced; /* the actor cannot go on: any of them is as good */
	bool store, dies;
} alternatives;

#define POINTS 200000u
static alternatives trace[POINTS];

/* Memory that matters: by 8 bytes, who read and who wrote. Open addressing. */
#define TOUCHED (1u << 20)
static struct touched {
	uintptr_t at;
	uint8_t readers, writers;
} touched[TOUCHED];
static bool conflicts_grew;

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
	if (running && (schedule_plant != PLANT_NO_FENCE))
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

	trace[point] = (alternatives){.to = matters ? others_that_go_on() : 0,
	                              .store = writes,
	                              .dies = writes};
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
	if (schedule_plant == PLANT_LOST_STORE && ++stores == schedule_plant_at)
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

static void wait_for(enum condition why, const void *what)
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

static bool run(uint32_t n)
{
	begin_again();
	planned = n;
	followed = point = posts = 0;
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

/* ---- the search ---- */

static outcome result;

static void tell(uint32_t n)
{
	size_t at = (size_t)snprintf(result.wrong, sizeof(result.wrong), "%s (", failure);

	for (uint32_t i = 0; i < n && at < sizeof(result.wrong); i++) {
		deviation d = plan[i];

		at += (size_t)snprintf(result.wrong + at, sizeof(result.wrong) - at, "%s%u:", i ? " " : "",
		                       d.point);
		if (at < sizeof(result.wrong))
			at += (size_t)snprintf(result.wrong + at, sizeof(result.wrong) - at,
			                       d.what == DIE     ? "dies"
			                       : d.what == DELAY ? "delays"
			                                         : "to %u",
			                       d.to);
	}
	if (at < sizeof(result.wrong))
		snprintf(result.wrong + at, sizeof(result.wrong) - at, ")");
}

static bool enough(const bounds *b)
{
	if (b->most && result.runs >= b->most) {
		result.whole = false;
		return true;
	}
	return *result.wrong != 0;
}

static void search(uint32_t n, bounds b)
{
	alternatives *mine;
	uint32_t last, first = n ? plan[n - 1].point + 1 : 1;

	if (enough(&b))
		return;
	result.runs++;
	if (!run(n)) {
		tell(n);
		return;
	}
	last = point;
	if (last > result.points)
		result.points = last;
	if (n == DEVIATIONS || last < first)
		return;
	mine = malloc((last - first + 1) * sizeof(*mine));
	memcpy(mine, trace + first, (last - first + 1) * sizeof(*mine));
	for (uint32_t p = first; p <= last && !enough(&b); p++) {
		alternatives a = mine[p - first];

		for (uint32_t to = 0; to < ACTORS; to++) {
			bounds less = b;

			if (!(a.to >> to & 1) || (!a.forced && !b.switches))
				continue;
			less.switches -= !a.forced;
			plan[n] = (deviation){p, SWITCH, (uint8_t)to};
			search(n + 1, less);
		}
		if (a.dies && b.deaths) {
			bounds less = b;

			less.deaths--;
			plan[n] = (deviation){p, DIE, 0};
			search(n + 1, less);
		}
		if (a.store && a.to && b.delays) {
			bounds less = b;

			less.delays--;
			plan[n] = (deviation){p, DELAY, 0};
			search(n + 1, less);
		}
	}
	free(mine);
}

outcome schedule_search(const scenario *s, bounds b)
{
	current = s;
	memset(touched, 0, sizeof(touched));
	deaths = 0;
	memset(&result, 0, sizeof(result));
	do {
		conflicts_grew = false;
		result.whole = true;
		search(0, b);
	} while (conflicts_grew && !enough(&b));
	result.deaths = deaths;
	current = NULL;
	return result;
}

void schedule_reset(void)
{
	pages_forget();
	for (uint32_t i = 0; i < segment_count; i++)
		munmap(segments[i].base, segments[i].size);
	segment_count = lock_count = 0;
	heap_used = 0;
	ticks = 0;
	me = OUTSIDE;
	for (uint32_t i = 0; i < ACTORS; i++)
		actors[i].killed = false;
}
