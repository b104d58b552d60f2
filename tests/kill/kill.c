/*
 * Kill at every instruction. Each operation is stepped through once, instruction by instruction. Where
 * a byte of shared memory, a lock, or what was promised has changed, a copy of the segments gets the
 * marks that the kernel would leave, and a fresh process repairs it and is watched keeping the promises
 * (verdict.h). Every 50th instruction somebody really dies, the bytes must be those of the copy, and the
 * verdict is spoken again. From some of the copies the repair itself is stepped through in the same way.
 */
#include "image.h"
#include "scene.h"
#include "tracer.h"
#include "verdict.h"

#include <dlfcn.h>
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define LEVELS 3u /* who acts, who repairs, who repairs after the repairer's death */
#define TOO_LONG UINT64_C(20000000) /* instructions: it does not end */
#define TOLD 3u /* violations of an operation that are printed in full */

/* What the jobs write and the main process shows. */
typedef struct count {
	uint64_t instructions, changes, copies, deaths, nested, violations;
	bool begun, over;
	char told[TOLD][1024];
} count;

typedef struct options {
	const char *operation;
	uint32_t jobs;
	uint32_t every;   /* judge every n-th change */
	uint32_t real;    /* a real death every n instructions */
	uint32_t nested;  /* how many repairs of an operation are stepped through, */
	uint32_t within;  /* judging there every n-th change */
	uint32_t depth;   /* how many at[] */
	uint64_t at[LEVELS];
	bool list;
} options;

static options opt = {.jobs = 0, .every = 1, .real = 50, .nested = 6, .within = 7};

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
	uint64_t death_count;
} level;

typedef struct job {
	const operation *operation;
	count *count;
	scene scene;
	level levels[LEVELS + 1];
	marks others; /* who lives on */
} job;

static void *shared(size_t bytes)
{
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	if (p == MAP_FAILED) {
		perror("mmap");
		exit(2);
	}
	return p;
}

/* ---- who acts ---- */

/* On a level: the operation itself, or whoever repairs after a death at that instruction. */
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
			s->ledger->takers = 2; /* what it held may come back behind what it saw next */
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
	         j->operation->name, how, path, where, comers[first], wrong_words, j->operation->name, path);
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

/* Whoever comes first; only one of them after a repairer's death, by turns. */
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

/* Again from the start to that place, and then for real; and who repairs after it is stepped through too,
 * if `deeper`. */
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
		snprintf(wrong_words, WRONG, "segment %u differs at byte %llu from what the tracer expected",
		         file, (unsigned long long)where);
		tell(j, at, address, first, "killed");
	}
	if (!verdict(&s, first, &j->others))
		tell(j, at, address, first, "killed");
	if (opt.depth == at + 1)
		judge_copies(j, at, &m, address);
	if (deeper)
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

static void note_place(level *here, uint64_t n, uint64_t address, uint64_t nth)
{
	uint64_t room = here->death_count;

	if (!(room & (room - 1))) {
		here->deaths = realloc(here->deaths, (room ? 2 * room : 1) * sizeof(place));
		CHECK(here->deaths);
	}
	here->deaths[here->death_count++] = (place){n, address, nth};
}

static void inspect(job *j, unsigned at, tracee *t, uint64_t *changes)
{
	level *here = &j->levels[at];
	marks m;

	if (!t->entered && !t->complete && !image_follow(&here->now, &here->files) && !marks_stale(t->pid))
		return;
	image_follow(&here->now, &here->files);
	marks_read(&m, t->pid, &here->files, t->entered);
	if (++*changes % (at ? opt.within * at * at : opt.every) && !t->complete)
		return;
	here->at = t->count;
	judge_copies(j, at, &m, tracee_at(t));
}

/* Where something has changed: a death in a copy. */
static void walk(job *j, unsigned at)
{
	uint64_t changes = 0, real = at ? opt.real * 20 : opt.real;
	level *here = &j->levels[at];
	tracee t;

	walks++;
	here->death_count = 0;
	for (start(j, at, &t); !t.failed; tracee_step(&t)) {
		uint64_t address = tracee_at(&t), nth = hit(address);

		inspect(j, at, &t, &changes);
		if (t.complete)
			break;
		if (real && t.count && t.count % real == 0)
			note_place(here, t.count, address, nth);
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
	if (!at)
		j->count->changes = changes;
}

static void explore(job *j, unsigned at)
{
	level *here = &j->levels[at];
	uint64_t wanted = at == 0 ? opt.nested : at == 1, n = 0;

	image_follow(&here->start, &here->files);
	image_follow(&here->now, &here->files);
	here->started = *here->ledger;
	walk(j, at);
	for (uint64_t i = 1; i <= here->death_count; i++) {
		/* spread evenly: so many of the operation, one of each repair */
		uint64_t before = n;

		n = i * wanted / here->death_count;
		die_at(j, at, here->deaths[i - 1], at + 1 < LEVELS && n != before);
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
	for (unsigned i = 0; i < opt.depth; i++) {
		level *here = &j->levels[i];

		image_follow(&here->start, &here->files);
		here->started = *here->ledger;
		die_at(j, i, (place){.n = opt.at[i]}, false);
	}
}

static void job_run(const operation *o, count *c)
{
	static job j;

	j.operation = o;
	j.count = c;
	c->begun = true;
	wrong_words = shared(WRONG);
	job_setup(&j);
	if (opt.depth)
		follow_path(&j);
	else
		explore(&j, 0);
	c->over = true;
}

/* The n-th of the processors this process may use: tracer and traced on one are twice as fast. */
static void pin(uint32_t n)
{
	cpu_set_t all, one;

	if (sched_getaffinity(0, sizeof(all), &all))
		return;
	n %= (uint32_t)CPU_COUNT(&all);
	for (int i = 0; i < CPU_SETSIZE; i++)
		if (CPU_ISSET(i, &all) && !n--) {
			CPU_ZERO(&one);
			CPU_SET(i, &one);
			(void)sched_setaffinity(0, sizeof(one), &one);
			return;
		}
}

/* ---- the main process ---- */

static uint64_t dead_of(const count *c)
{
	return c->copies + c->deaths + c->nested;
}

static count total_of(const count *counts)
{
	count all = {0};

	for (uint32_t i = 0; i < operation_count; i++) {
		all.instructions += counts[i].instructions;
		all.copies += counts[i].copies;
		all.deaths += counts[i].deaths;
		all.nested += counts[i].nested;
		all.violations += counts[i].violations;
		all.changes += counts[i].over; /* of the total: operations that are over */
	}
	return all;
}

static time_t began;

static void show_progress(const count *counts, uint32_t wanted)
{
	count all = total_of(counts);
	int done = (int)(wanted ? 30 * all.changes / wanted : 0);
	long seconds = (long)(time(NULL) - began);

	if (!isatty(2))
		return;
	fprintf(stderr, "\r[%.*s%*s] %llu/%u operations, %llu instructions, %llu deaths, %llu violations, %ld:%02ld ",
	        done, "##############################", 30 - done, "", (unsigned long long)all.changes, wanted,
	        (unsigned long long)all.instructions, (unsigned long long)dead_of(&all),
	        (unsigned long long)all.violations, seconds / 60, seconds % 60);
}

static void print_row(const char *name, const count *c)
{
	printf("%-36s %12llu %8llu %8llu %8llu %10llu\n", name, (unsigned long long)c->instructions,
	       (unsigned long long)c->copies, (unsigned long long)c->deaths, (unsigned long long)c->nested,
	       (unsigned long long)c->violations);
}

static bool wanted(uint32_t i)
{
	return !opt.operation || !strcmp(opt.operation, operations[i].name);
}

static int report(const count *counts)
{
	count all = total_of(counts);

	if (isatty(2))
		fprintf(stderr, "\r%*s\r", 110, "");
	printf("%-36s %12s %8s %8s %8s %10s\n", "operation", "instructions", "copied", "killed", "repairs",
	       "violations");
	for (uint32_t i = 0; i < operation_count; i++)
		if (wanted(i))
			print_row(operations[i].name, &counts[i]);
	print_row("all", &all);
	for (uint32_t i = 0; i < operation_count; i++)
		for (uint64_t k = 0; k < counts[i].violations && k < TOLD; k++)
			printf("\n%s\n", counts[i].told[k]);
	return all.violations != 0;
}

static void sweep(count *counts)
{
	uint32_t next = 0, running = 0, all = 0, slots = opt.jobs;
	struct {
		pid_t pid;
		uint32_t operation;
	} *slot = calloc(slots, sizeof(*slot));

	for (uint32_t i = 0; i < operation_count; i++)
		all += wanted(i);
	while (next < operation_count || running) {
		struct timespec moment = {.tv_nsec = 50000000};
		int status;

		for (uint32_t k = 0; k < slots && next < operation_count; k++) {
			while (next < operation_count && !wanted(next))
				next++;
			if (slot[k].pid || next == operation_count)
				continue;
			fflush(stdout);
			slot[k].operation = next++;
			slot[k].pid = fork();
			if (!slot[k].pid) {
				pin(k);
				job_run(&operations[slot[k].operation], &counts[slot[k].operation]);
				_exit(0);
			}
			running++;
		}
		for (uint32_t k = 0; k < slots; k++) {
			count *c = &counts[slot[k].operation];

			if (!slot[k].pid || waitpid(slot[k].pid, &status, WNOHANG) != slot[k].pid)
				continue;
			slot[k].pid = 0;
			running--;
			if (!c->over) {
				snprintf(c->told[0], sizeof(c->told[0]), "%s: the tracer itself ended (status %x): %s",
				         operations[slot[k].operation].name, status, wrong_words);
				c->violations++;
				c->over = true;
			}
			if (!isatty(2))
				fprintf(stderr, "%s: %llu instructions, %llu deaths, %llu violations\n",
				        operations[slot[k].operation].name, (unsigned long long)c->instructions,
				        (unsigned long long)dead_of(c), (unsigned long long)c->violations);
		}
		show_progress(counts, all);
		nanosleep(&moment, NULL);
	}
	free(slot);
}

static const char usage[] =
        "usage: tools/dev kill [--operation NAME] [--at N[,N[,N]]] [--every N] [--real N] [--nested N]\n"
        "                      [--within N] [--jobs N] [--sample] [--list]\n"
        "  --operation  only this one (--list names them)\n"
        "  --at         one death at instruction N (of its repair at the second N, ...), for real\n"
        "  --every      judge every n-th change of shared memory (1: all)\n"
        "  --real       really kill every n instructions (50; 0: never)\n"
        "  --nested     step through n repairs of each operation (6), judging every --within changes (7)\n"
        "  --sample     --every 20 --real 1000 --nested 1 --within 150\n";

static uint64_t number(const char *text)
{
	char *end;
	uint64_t n = text ? strtoull(text, &end, 10) : 0;

	if (!text || *end) {
		fputs(usage, stderr);
		exit(2);
	}
	return n;
}

static void read_path(char *text)
{
	for (char *part = strtok(text ? text : (char[]){""}, ","); part && opt.depth < LEVELS;
	     part = strtok(NULL, ","))
		opt.at[opt.depth++] = number(part);
}

static void read_options(int argc, char **argv)
{
	for (int i = 1; i < argc; i++) {
		char *value = i + 1 < argc ? argv[i + 1] : NULL;

		if (!strcmp(argv[i], "--list")) {
			opt.list = true;
			continue;
		}
		if (!strcmp(argv[i], "--help")) {
			fputs(usage, stdout);
			exit(0);
		}
		if (!strcmp(argv[i], "--sample")) {
			opt.every = 20;
			opt.real = 1000;
			opt.nested = 1;
			opt.within = 150;
			continue;
		}
		i++;
		if (!strcmp(argv[i - 1], "--operation"))
			opt.operation = value;
		else if (!strcmp(argv[i - 1], "--at"))
			read_path(value);
		else if (!strcmp(argv[i - 1], "--every"))
			opt.every = (uint32_t)number(value);
		else if (!strcmp(argv[i - 1], "--real"))
			opt.real = (uint32_t)number(value);
		else if (!strcmp(argv[i - 1], "--nested"))
			opt.nested = (uint32_t)number(value);
		else if (!strcmp(argv[i - 1], "--within"))
			opt.within = (uint32_t)number(value);
		else if (!strcmp(argv[i - 1], "--jobs"))
			opt.jobs = (uint32_t)number(value);
		else
			number(NULL);
	}
	if (!opt.jobs)
		opt.jobs = (uint32_t)sysconf(_SC_NPROCESSORS_ONLN);
	if (!opt.every || !opt.within || (opt.depth && !opt.operation))
		number(NULL);
}

int main(int argc, char **argv)
{
	count *counts = shared(sizeof(count) * operation_count);
	bool found = false;

	read_options(argc, argv);
	wrong_words = shared(WRONG);
	for (uint32_t i = 0; i < operation_count; i++) {
		found |= wanted(i);
		if (opt.list)
			puts(operations[i].name);
	}
	if (opt.list)
		return 0;
	if (!found) {
		fprintf(stderr, "no operation '%s'; --list names them\n", opt.operation);
		return 2;
	}
	began = time(NULL);
	sweep(counts);
	return report(counts);
}
