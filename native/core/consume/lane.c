/*
 * Which lane of a consumer of many queues is next (lanes.c), and how many messages it may take.
 *
 * Levels: the lanes of one level take turns. `strict` serves a level only while all before it are
 * empty, and looks into the queues themselves to know; otherwise the levels share by their weights.
 */
#include "consume/lane.h"

#include "base/atomics.h"
#include "base/killpoint.h"
#include "consume/consumer.h"
#include "memory/handles.h"
#include "memory/mapping.h"
#include "sync/doorbell.h"

#include <stdlib.h>
#include <string.h>

/* A level that stands so far is moved back, with all others. */
#define PASS_MOST (UINT64_C(1) << 62)

/* ---- which lanes may have something --------------------------------------------------------- */

void lane_activate(lane *x)
{
	x->level->active[x->place / 64] |= UINT64_C(1) << x->place % 64;
}

void lanes_collect(shmq_lanes *l)
{
	uint32_t bell = ld(&l->bell);
	shmq_waiter_desc *waiter;

	if (bell == SHMQ_NONE)
		return;
	waiter = &l->b->waiters[bell];
	for (uint32_t i = 0; i < SHMQ_HINTS / 64; i++) {
		uint64_t bits = ld(&waiter->hints[i]);

		if (bits)
			bits = atomic_exchange(&waiter->hints[i], 0); /* SYNC(hint) */
		for (; bits; bits &= bits - 1)
			for (lane *x = l->by_hint[i * 64 + (uint32_t)__builtin_ctzll(bits)]; x; x = x->next)
				lane_activate(x);
	}
}

/* Rings may get lost when a process dies, so all lanes are looked at once in a second. */
void lanes_activate_all(shmq_lanes *l)
{
	for (uint32_t v = 0; v < l->levels_count; v++)
		for (uint32_t i = 0; i < l->levels[v].count; i++)
			lane_activate(l->levels[v].lanes[i]);
}

/* The lane had nothing: hear of its next message. Returns false if it has something after all. */
static bool quiet(const shmq_lanes *l, lane *x)
{
	uint32_t bell = ld(&l->bell);

	if (bell == SHMQ_NONE)
		return false;
	if (!wait_is_announced(takers_of(x), bell)) {
		wait_announce(takers_of(x), bell);
		SHMQ_KILLPOINT("lanes.announced");
		if (may_take(x->c))
			return false;
	}
	x->level->active[x->place / 64] &= ~(UINT64_C(1) << x->place % 64);
	return true;
}

/* The first active lane from `at` on, without turning round; `count` if there is none. */
uint32_t active_from(const level *v, uint32_t at)
{
	for (uint32_t word = at / 64; word < (v->count + 63) / 64; word++) {
		uint64_t bits = v->active[word];

		if (word == at / 64)
			bits &= ~UINT64_C(0) << at % 64;
		if (bits)
			return word * 64 + (uint32_t)__builtin_ctzll(bits);
	}
	return v->count;
}

/* ---- which lane is next --------------------------------------------------------------------- */

/* The next lane of the level, in turn, that has something. Those that have nothing become quiet. */
static lane *level_next(const shmq_lanes *l, const level *v)
{
	for (uint32_t half = 0; half < 2; half++) {
		uint32_t at = half ? 0 : v->first, end = half ? v->first : v->count;

		for (at = active_from(v, at); at < end; at = active_from(v, at + 1)) {
			lane *x = v->lanes[at];

			if (x->refused == l->round)
				continue;
			if (may_take(x->c) || (!quiet(l, x) && may_take(x->c)))
				return x;
		}
	}
	return NULL;
}

static bool level_refused(const shmq_lanes *l, const level *v)
{
	for (uint32_t at = active_from(v, 0); at < v->count; at = active_from(v, at + 1))
		if (v->lanes[at]->refused == l->round)
			return true;
	return false;
}

/* A message for which somebody else was woken left no hint here. Look into the queues: a level
 * behind this one is served only if all of them are empty. */
static void level_look(const level *v)
{
	for (uint32_t i = 0; i < v->count; i++)
		if (may_take(v->lanes[i]->c))
			lane_activate(v->lanes[i]);
}

static lane *choose_strict(const shmq_lanes *l)
{
	for (uint32_t i = 0; i < l->levels_count; i++) {
		level *v = &l->levels[i];
		lane *x = level_next(l, v);

		if (!x && i + 1 < l->levels_count) {
			level_look(v);
			x = level_next(l, v);
		}
		if (x || level_refused(l, v))
			return x;
	}
	return NULL;
}

/* Each level has a pass, which every message that it gives moves by its share. The level with the
 * lowest pass is next. One that had nothing for a while does not make up for it: it begins where
 * the others are. */
static uint64_t pass_of(const shmq_lanes *l, const level *v)
{
	return v->pass > l->time ? v->pass : l->time;
}

static lane *choose_weighted(const shmq_lanes *l)
{
	lane *best = NULL;

	for (uint32_t i = 0; i < l->levels_count; i++) {
		lane *x = level_next(l, &l->levels[i]);

		if (x && (!best || pass_of(l, x->level) < pass_of(l, best->level)))
			best = x;
	}
	return best;
}

lane *lanes_choose(const shmq_lanes *l)
{
	return l->strict ? choose_strict(l) : choose_weighted(l);
}

void lanes_served(shmq_lanes *l, lane *x, uint32_t got)
{
	level *v = x->level;

	v->first = x->place + 1 < v->count ? x->place + 1 : 0;
	l->time = pass_of(l, v);
	v->pass = l->time + got * v->stride;
	if (v->pass < PASS_MOST)
		return;
	for (uint32_t i = 0; i < l->levels_count; i++)
		l->levels[i].pass = pass_of(l, &l->levels[i]) - l->time;
	l->time = 0;
}

/* ---- the limit ------------------------------------------------------------------------------ */

static uint32_t in_flight_of(const lane *x)
{
	return ld(&x->c->map->sessions[x->c->session].in_flight);
}

/* How many messages may be taken, up to n. `held` is a bound from above; it is counted anew, over
 * the lanes that have some, only when it is in the way. */
uint32_t lanes_room(shmq_lanes *l, uint32_t n)
{
	uint32_t kept = 0;

	if (l->held + n > l->max_in_flight) {
		l->held = l->reserved;
		for (uint32_t i = 0; i < l->holders_count; i++) {
			lane *x = l->holders[i];
			uint32_t count = in_flight_of(x);

			l->held += count;
			x->holds = count || x->users;
			if (x->holds)
				l->holders[kept++] = x;
		}
		l->holders_count = kept;
	}
	if (l->held >= l->max_in_flight)
		return 0;
	return l->max_in_flight - l->held < n ? (uint32_t)(l->max_in_flight - l->held) : n;
}

/* A copy of an array with room for twice as many entries, which replaces it; NULL: no memory. */
static void *grown(void *array, uint32_t count, uint32_t room, size_t entry)
{
	void *larger = calloc(room, entry);

	if (larger && count)
		memcpy(larger, array, count * entry);
	if (larger)
		free(array);
	return larger;
}

bool lane_hold(shmq_lanes *l, lane *x)
{
	if (x->holds)
		return true;
	if (l->holders_count == l->holders_room) {
		uint32_t more = l->holders_room ? 2 * l->holders_room : 16;
		lane **larger = grown(l->holders, l->holders_count, more, sizeof(*larger));

		if (!larger)
			return false;
		l->holders = larger;
		l->holders_room = more;
	}
	l->holders[l->holders_count++] = x;
	x->holds = true;
	return true;
}

/* ---- levels -------------------------------------------------------------------------------- */

bool level_grow(level *v)
{
	uint32_t more = v->room ? 2 * v->room : 64; /* a whole number of words of `active` */
	uint64_t *active;
	lane **lanes;

	if (v->count < v->room)
		return true;
	active = grown(v->active, v->room / 64, more / 64, sizeof(*active));
	if (!active)
		return false;
	v->active = active; /* it may be longer than `room` says */
	lanes = grown(v->lanes, v->count, more, sizeof(*lanes));
	if (!lanes)
		return false;
	v->lanes = lanes;
	v->room = more;
	return true;
}

/* The lanes behind it move up, with their activity. */
void level_leave(lane *x)
{
	level *v = x->level;

	v->count--;
	for (uint32_t i = x->place; i < v->count; i++) {
		lane *y = v->lanes[i] = v->lanes[i + 1];
		bool active = v->active[(i + 1) / 64] >> (i + 1) % 64 & 1;

		y->place = i;
		v->active[i / 64] &= ~(UINT64_C(1) << i % 64);
		if (active)
			lane_activate(y);
	}
	v->active[v->count / 64] &= ~(UINT64_C(1) << v->count % 64);
	if (v->first > x->place)
		v->first--;
	if (v->first >= v->count)
		v->first = 0;
}
