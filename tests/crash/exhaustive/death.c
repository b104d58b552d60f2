#include "death.h"

#include "image.h"
#include "tracer.h"
#include "verdict.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define TOO_LONG UINT64_C(20000000) /* instructions: it does not end */
#define REAL_DEATHS 700u /* of one walk, at most: one operation has 300000 instructions */

/* The n-th instruction is the one at `address` for the `nth` time. */
typedef struct place {
	uint64_t n, address, nth;
} place;

/* Somebody acts on these files; copies of them go to the next level. */
typedef struct level {
	files files;
	image start, now;
	ledger *ledger, started;
	uint64_t at;   /* instruction at which the one of this level died */
	place *deaths; /* where it is to die for real */
	uint64_t death_count, stops;
} level;

typedef struct job {
	const operation *operation;
	const plan *plan;
	count *count;
	scene scene;
	level levels[LEVELS + 1];
	marks others; /* of the clients that live on */
} job;

/* ---- the process that dies ---- */

/* Level 0: the operation itself; else a repair after a death at that instruction. */
typedef struct actor {
	scene *scene;
	unsigned level;
	enum comer comer;
} actor;

static enum comer comer_after(uint64_t instruction)
{
	return (enum comer)(instruction % COMERS);
}

static void act(void *argument)
{
	actor *a = argument;
	scene *s = a->scene;

	if (a->level) {
		watched = true;
		if (a->comer == A_CONSUMER)
			s->ledger->takers = 2; /* what it held may come back after what it saw next */
		repair(s, a->comer);
		return;
	}
	if (s->operation->ready)
		s->operation->ready(s);
	watched = true;
	s->operation->act(s);
}

static scene scene_at(job *j, unsigned at)
{
	scene s = j->scene;

	s.files = &j->levels[at].files;
	s.ledger = j->levels[at].ledger;
	return s;
}

/* From the beginning, stopped before its first instruction. */
static void start(job *j, unsigned at, tracee *t)
{
	scene s = scene_at(j, at);
	actor a = {&s, at, at ? comer_after(j->levels[at - 1].at) : THE_REAPER};

	wrong_words[0] = 0;
	tracee_start(t, act, &a);
}

/* ---- what is told ---- */

static void name_place(char *to, size_t size, uint64_t address)
{
	Dl_info info;
	char command[600], line[300] = "";
	FILE *pipe;

	snprintf(to, size, "%#llx", (unsigned long long)address);
	if (!address || !dladdr((void *)(uintptr_t)address, &info))
		return;
	snprintf(to, size, "%s in %s", info.dli_sname ? info.dli_sname : "?", info.dli_fname);
	snprintf(command, sizeof(command), "addr2line -sfpie '%s' %#llx 2>/dev/null", info.dli_fname,
	         (unsigned long long)(address - (uint64_t)(uintptr_t)info.dli_fbase));
	pipe = popen(command, "r");
	if (!pipe)
		return;
	if (fgets(line, sizeof(line), pipe) && line[0] != '?') {
		line[strcspn(line, "\n")] = 0;
		snprintf(to, size, "%s", line);
	}
	pclose(pipe);
}

static void tell(job *j, unsigned at, uint64_t address, enum comer first, const char *how)
{
	static const char *const comers[COMERS] = {"the reaper", "a publisher", "a consumer"};
	uint64_t nth = j->count->violations++;
	char where[400], path[80] = "";

	if (nth >= TOLD)
		return;
	name_place(where, sizeof(where), address);
	for (unsigned i = 0; i <= at; i++)
		snprintf(path + strlen(path), sizeof(path) - strlen(path), "%s%llu", i ? "," : "",
		         (unsigned long long)j->levels[i].at);
	snprintf(j->count->told[nth], sizeof(j->count->told[nth]),
	         "%s, %s at instruction %s (%s), then %s came:\n    %s\n"
	         "    again: tools/dev kill --operation '%s' --at %s",
	         j->operation->name, how, path, where, comers[first], wrong_words, j->operation->name,
	         path);
}

/* ---- one death ---- */

/* The copy at the next level as it would be if the tracee died now. */
static void copy_death(job *j, unsigned at, const marks *m)
{
	level *here = &j->levels[at], *next = here + 1;

	image_put(&here->now, &next->files);
	marks_apply(m, &next->files);
	*next->ledger = *here->ledger;
}

/* One copy for each process that may come first; after a repairer's death only one of them, by turns. */
static void judge_copies(job *j, unsigned at, const marks *m, uint64_t address)
{
	for (enum comer c = 0; c < COMERS; c++) {
		scene s = scene_at(j, at + 1);

		if ((at || s.operation->alone) && c != comer_after(j->levels[at].at))
			continue;
		copy_death(j, at, m);
		*(at ? &j->count->nested : &j->count->copies) += 1;
		if (!verdict(&s, c, &j->others))
			tell(j, at, address, c, "dead");
	}
}

static void failed(job *j, unsigned at, const tracee *t)
{
	if (!wrong_words[0])
		snprintf(wrong_words, WRONG, "who acts ends with status %x", t->status);
	tell(j, at, 0, THE_REAPER, "failed");
}

static void explore(job *j, unsigned at);

/* Run again from the start to that place, and die for real. If `deeper`, the repair after it is
 * stepped through too. */
static void die_at(job *j, unsigned at, place where_to, bool deeper)
{
	level *here = &j->levels[at], *next = here + 1;
	uint64_t address, where;
	enum comer first;
	uint32_t file;
	tracee t;
	marks m;
	scene s;

	here->at = where_to.n;
	image_put(&here->start, &here->files);
	*here->ledger = here->started;
	start(j, at, &t);
	if (!where_to.nth || !tracee_run_to(&t, where_to.address, where_to.nth))
		while (t.count < where_to.n && tracee_step(&t))
			;
	if (t.failed) {
		failed(j, at, &t);
		tracee_kill(&t);
		return;
	}
	address = tracee_at(&t);
	marks_read(&m, t.pid, &here->files, true);
	image_follow(&here->now, &here->files);
	copy_death(j, at, &m);
	tracee_kill(&t);
	*(at ? &j->count->nested : &j->count->deaths) += 1;
	s = scene_at(j, at);
	first = comer_after(where_to.n);
	if (files_differ(&here->files, &next->files, &file, &where)) {
		snprintf(wrong_words, WRONG,
		         "segment %u differs at byte %llu from what the tracer expected", file,
		         (unsigned long long)where);
		tell(j, at, address, first, "killed");
	}
	if (!verdict(&s, first, &j->others))
		tell(j, at, address, first, "killed");
	if (j->plan->depth == at + 1)
		judge_copies(j, at, &m, address);
	if (deeper && !j->operation->alone) /* there nobody repairs */
		explore(j, at + 1);
}

/* ---- all deaths ---- */

#define HITS (1u << 16)

/* How often each instruction was met in this walk. */
static struct {
	uint64_t address, walk, count;
} hits[HITS];
static uint64_t walks;

static uint64_t hit(uint64_t address)
{
	uint64_t at = address * UINT64_C(0x9e3779b97f4a7c15) >> 48;

	while (hits[at].walk == walks && hits[at].address != address)
		at = (at + 1) % HITS;
	if (hits[at].walk != walks)
		hits[at].count = 0;
	hits[at].walk = walks;
	hits[at].address = address;
	return ++hits[at].count;
}

/* To get there again costs a stop for each time that its instruction ran. */
static void note_place(level *here, const plan *p, place found)
{
	uint64_t room = here->death_count;

	here->stops += found.nth;
	if (p->sparing && here->stops > found.n / p->sparing) {
		here->stops -= found.nth;
		return;
	}
	if (!(room & (room - 1))) {
		here->deaths = realloc(here->deaths, (room ? 2 * room : 1) * sizeof(place));
		CHECK(here->deaths);
	}
	here->deaths[here->death_count++] = found;
}

static bool is_enough(const job *j)
{
	return j->plan->first && j->count->violations;
}

static void inspect(job *j, unsigned at, tracee *t, uint64_t *changes)
{
	level *here = &j->levels[at];
	marks m;

	if (!t->entered && !t->complete && !image_follow(&here->now, &here->files) &&
	    !marks_stale(t->pid))
		return;
	image_follow(&here->now, &here->files);
	marks_read(&m, t->pid, &here->files, t->entered);
	if ((++*changes + j->plan->phase) % (at ? j->plan->within * at * at : j->plan->every) &&
	    !t->complete)
		return;
	here->at = t->count;
	judge_copies(j, at, &m, tracee_at(t));
}

/* Where something has changed: a death in a copy. */
static void walk(job *j, unsigned at)
{
	uint64_t changes = 0, real = at ? j->plan->real * 20 : j->plan->real;
	level *here = &j->levels[at];
	place rarest = {0};
	tracee t;

	walks++;
	here->death_count = here->stops = 0;
	for (start(j, at, &t); !t.failed && !is_enough(j); tracee_step(&t)) {
		uint64_t address = tracee_at(&t), nth = hit(address);

		inspect(j, at, &t, &changes);
		if (t.complete)
			break;
		if (t.count && (!rarest.nth || nth < rarest.nth))
			rarest = (place){t.count, address, nth};
		if (real && t.count && (t.count + j->plan->phase) % real == 0) {
			note_place(here, j->plan, rarest);
			rarest.nth = 0;
		}
		if (!at)
			j->count->instructions = t.count;
		if (t.count > TOO_LONG) {
			snprintf(wrong_words, WRONG, "it does not end");
			t.failed = true;
		}
	}
	here->at = t.count;
	if (t.failed)
		failed(j, at, &t);
	tracee_kill(&t);
}

static void explore(job *j, unsigned at)
{
	level *here = &j->levels[at];
	uint64_t wanted = at == 0 ? j->plan->nested : at == 1, n = 0, deaths;

	image_follow(&here->start, &here->files);
	image_follow(&here->now, &here->files);
	here->started = *here->ledger;
	walk(j, at);
	deaths = here->death_count < REAL_DEATHS ? here->death_count : REAL_DEATHS;
	for (uint64_t i = 1; i <= deaths && !is_enough(j); i++) {
		/* spread evenly: `wanted` of the operation, one of each repair */
		uint64_t before = n;

		n = (i * wanted + j->plan->phase % deaths) / deaths;
		die_at(j, at, here->deaths[i * here->death_count / deaths - 1],
		       at + 1 < LEVELS && n != before);
	}
}

/* ---- a job: one operation ---- */

static void job_setup(job *j)
{
	for (unsigned i = 0; i <= LEVELS; i++) {
		files_make(&j->levels[i].files);
		image_make(&j->levels[i].start);
		image_make(&j->levels[i].now);
		j->levels[i].ledger = shared(sizeof(ledger));
	}
	scene_make(&j->scene, j->operation, &j->levels[0].files, j->levels[0].ledger);
	marks_read(&j->others, (pid_t)syscall(SYS_gettid), &j->levels[0].files, true);
}

static void follow_path(job *j)
{
	for (unsigned i = 0; i < j->plan->depth; i++) {
		level *here = &j->levels[i];

		image_follow(&here->start, &here->files);
		here->started = *here->ledger;
		die_at(j, i, (place){.n = j->plan->at[i]}, false);
	}
}

void death_of(const operation *o, const plan *p, count *c)
{
	static job j;

	j.operation = o;
	j.plan = p;
	j.count = c;
	wrong_words = shared(WRONG);
	job_setup(&j);
	if (p->depth)
		follow_path(&j);
	else
		explore(&j, 0);
	c->over = true;
}
