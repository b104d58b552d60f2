/* tools/dev kill: every death of every operation (death.h), some operations at a time. */
#include "death.h"
#include "operations.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static struct {
	const char *operation;
	uint32_t jobs, share;
	bool list;
} opt = {.share = 1};
static plan how = {.every = 1, .real = 50, .nested = 6, .within = 7};

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

static uint64_t dead_of(const count *c)
{
	return c->copies + c->deaths + c->nested;
}

static count total_of(const count *counts)
{
	count all = {0};

	for (uint32_t i = 0; i < operation_count(); i++) {
		all.instructions += counts[i].instructions;
		all.copies += counts[i].copies;
		all.deaths += counts[i].deaths;
		all.nested += counts[i].nested;
		all.violations += counts[i].violations;
	}
	return all;
}

static time_t began;

static void show_progress(const count *counts, uint32_t wanted)
{
	count all = total_of(counts);
	long seconds = (long)(time(NULL) - began);
	uint32_t over = 0;
	int done;

	if (!isatty(2))
		return;
	for (uint32_t i = 0; i < operation_count(); i++)
		over += counts[i].over;
	done = (int)(30 * over / wanted);
	fprintf(stderr,
	        "\r[%.*s%*s] %u/%u operations, %llu instructions, %llu deaths, %llu "
	        "violations, %ld:%02ld ",
	        done, "##############################", 30 - done, "", over, wanted,
	        (unsigned long long)all.instructions, (unsigned long long)dead_of(&all),
	        (unsigned long long)all.violations, seconds / 60, seconds % 60);
}

static void print_row(const char *name, const count *c)
{
	printf("%-36s %12llu %8llu %8llu %8llu %10llu\n", name, (unsigned long long)c->instructions,
	       (unsigned long long)c->copies, (unsigned long long)c->deaths,
	       (unsigned long long)c->nested, (unsigned long long)c->violations);
}

static bool wanted(uint32_t i)
{
	/* Another phase, other operations. */
	return opt.operation ? !strcmp(opt.operation, operation_at(i)->name)
	                     : (i + how.phase) % opt.share == 0;
}

static int report(const count *counts)
{
	count all = total_of(counts);

	if (isatty(2))
		fprintf(stderr, "\r%*s\r", 110, "");
	printf("%-36s %12s %8s %8s %8s %10s\n", "operation", "instructions", "copied", "killed",
	       "repairs", "violations");
	for (uint32_t i = 0; i < operation_count(); i++)
		if (wanted(i))
			print_row(operation_at(i)->name, &counts[i]);
	print_row("all", &all);
	for (uint32_t i = 0; i < operation_count(); i++)
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

	for (uint32_t i = 0; i < operation_count(); i++)
		all += wanted(i);
	while (next < operation_count() || running) {
		struct timespec moment = {.tv_nsec = 50000000};
		int status;

		for (uint32_t k = 0; k < slots && next < operation_count(); k++) {
			while (next < operation_count() && !wanted(next))
				next++;
			if (slot[k].pid || next == operation_count())
				continue;
			fflush(stdout);
			slot[k].operation = next++;
			slot[k].pid = fork();
			if (!slot[k].pid) {
				pin(k);
				death_of(operation_at(slot[k].operation), &how, &counts[slot[k].operation]);
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
				snprintf(c->told[0], sizeof(c->told[0]),
				         "%s: the tracer itself ended (status %x): %s",
				         operation_at(slot[k].operation)->name, status, wrong_words);
				c->violations++;
				c->over = true;
			}
			if (!isatty(2))
				fprintf(stderr, "%s: %llu instructions, %llu deaths, %llu violations\n",
				        operation_at(slot[k].operation)->name, (unsigned long long)c->instructions,
				        (unsigned long long)dead_of(c), (unsigned long long)c->violations);
		}
		show_progress(counts, all);
		nanosleep(&moment, NULL);
	}
	free(slot);
}

static const char usage[] =
		"usage: tools/dev kill [--operation NAME] [--at N[,N[,N]]] [--every N] "
		"[--real N] [--nested N]\n"
		"                      [--within N] [--phase N] [--share N] [--jobs N] [--sample] "
		"[--list]\n"
		"  --operation  only this one (--list names them)\n"
		"  --at         one death at instruction N (of its repair at the second N, "
		"...), for real\n"
		"  --every      judge every n-th change of shared memory (1: all)\n"
		"  --real       really kill once in every n instructions (50; 0: never)\n"
		"  --nested     step through n repairs of each operation (6), judging "
		"every --within changes (7)\n"
		"  --phase      which of each n changes and instructions (0: the last)\n"
		"  --share      only every n-th operation (1: all)\n"
		"  --sample     --every 20 --real 1000 --nested 1 --within 150, fewer real deaths in "
		"loops, and "
		"a --phase\n"
		"               that is drawn anew and shown\n";

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
	for (char *part = strtok(text ? text : (char[]){""}, ","); part && how.depth < LEVELS;
	     part = strtok(NULL, ","))
		how.at[how.depth++] = number(part);
}

/* Each run of a sample looks at other places than the one before. */
static void draw_phase(void)
{
	uint32_t drawn;

	if (getrandom(&drawn, sizeof(drawn), 0) != sizeof(drawn))
		drawn = (uint32_t)time(NULL);
	how.phase = drawn % 3000; /* as many as differ: 20 and 1000 divide 3000, and so does 150 */
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
			how.every = 20;
			how.real = 1000;
			how.nested = 1;
			how.within = 150;
			how.sparing = 8;
			draw_phase();
			continue;
		}
		i++;
		if (!strcmp(argv[i - 1], "--operation"))
			opt.operation = value;
		else if (!strcmp(argv[i - 1], "--at"))
			read_path(value);
		else if (!strcmp(argv[i - 1], "--every"))
			how.every = (uint32_t)number(value);
		else if (!strcmp(argv[i - 1], "--real"))
			how.real = (uint32_t)number(value);
		else if (!strcmp(argv[i - 1], "--nested"))
			how.nested = (uint32_t)number(value);
		else if (!strcmp(argv[i - 1], "--within"))
			how.within = (uint32_t)number(value);
		else if (!strcmp(argv[i - 1], "--phase"))
			how.phase = (uint32_t)number(value);
		else if (!strcmp(argv[i - 1], "--share"))
			opt.share = (uint32_t)number(value);
		else if (!strcmp(argv[i - 1], "--jobs"))
			opt.jobs = (uint32_t)number(value);
		else
			number(NULL);
	}
	if (!opt.jobs)
		opt.jobs = (uint32_t)sysconf(_SC_NPROCESSORS_ONLN);
	if (!how.every || !how.within || !opt.share || (how.depth && !opt.operation))
		number(NULL);
}

int main(int argc, char **argv)
{
	count *counts = shared(sizeof(count) * operation_count());
	bool found = false;

	read_options(argc, argv);
	wrong_words = shared(WRONG);
	for (uint32_t i = 0; i < operation_count(); i++) {
		found |= wanted(i);
		if (opt.list)
			puts(operation_at(i)->name);
	}
	if (opt.list)
		return 0;
	if (!found) {
		fprintf(stderr, "no operation '%s'; --list names them\n", opt.operation);
		return 2;
	}
	began = time(NULL);
	if (how.phase)
		printf("--phase %u\n", how.phase);
	sweep(counts);
	return report(counts);
}
