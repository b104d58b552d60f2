/*
 * Every operation (operations.h), killed at every killpoint that its code passes, at every passing;
 * then repaired, with the repairers killed as well; then held to the promises (verdict.h).
 *
 * The points are read from the sources in native/core, so a new one is tested from the day it is
 * written. A point that no operation passes fails the test.
 *
 * Usage: test_killpoints SOURCES [OPERATION]
 */
#include "operations.h"
#include "verdict.h"

#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define POINTS 256u
#define NAME 64u
#define REPAIRERS 3u /* killed, one after the other, before one is let live */

static char points[POINTS][NAME];
static uint32_t point_count, repair_points[POINTS], repair_count;

/* Shared by the processes of all operations. */
typedef struct tally {
	uint32_t runs, deaths, repairer_deaths;
	uint32_t hits[POINTS]; /* deaths at each point */
	uint32_t turn;         /* which repair point is next */
} tally;

typedef struct job {
	scene scene;
	image start; /* every run begins with it */
	ledger started;
	marks others; /* of the clients that live on */
	tally *tally;
} job;

/* ---- the points ---- */

static bool is_of_repair(const char *point)
{
	static const char *const prefixes[] = {"rebuild.", "recover.", "reap.",         "return.",
	                                       "release.", "back.",    "lease.orphaned"};

	for (size_t i = 0; i < sizeof(prefixes) / sizeof(prefixes[0]); i++)
		if (!strncmp(point, prefixes[i], strlen(prefixes[i])))
			return true;
	return false;
}

static bool is_known(const char *name, size_t length)
{
	for (uint32_t i = 0; i < point_count; i++)
		if (!strncmp(points[i], name, length) && !points[i][length])
			return true;
	return false;
}

static void add_points(const char *text)
{
	static const char macro[] = "SHMQ_KILLPOINT(\"";

	while ((text = strstr(text, macro))) {
		const char *name = text + strlen(macro);
		size_t length = strcspn(name, "\"");

		text = name;
		if (is_known(name, length))
			continue;
		CHECK(length < NAME && point_count < POINTS);
		memcpy(points[point_count], name, length);
		if (is_of_repair(points[point_count]))
			repair_points[repair_count++] = point_count;
		point_count++;
	}
}

static void read_points(const char *directory)
{
	static char text[1 << 20];
	DIR *d = opendir(directory);
	struct dirent *entry;

	CHECK(d);
	while ((entry = readdir(d))) {
		size_t length = strlen(entry->d_name);
		char path[4096];
		FILE *f;

		snprintf(path, sizeof(path), "%s/%s", directory, entry->d_name);
		if (entry->d_type == DT_DIR && entry->d_name[0] != '.')
			read_points(path);
		if (length < 2 ||
		    (strcmp(entry->d_name + length - 2, ".c") && strcmp(entry->d_name + length - 2, ".h")))
			continue;
		f = fopen(path, "r");
		CHECK(f);
		text[fread(text, 1, sizeof(text) - 1, f)] = 0;
		fclose(f);
		add_points(text);
	}
	closedir(d);
}

/* ---- one death ---- */

static _Noreturn void fail(const job *j, const char *point, uint32_t passing)
{
	fprintf(stderr, "%s, killed at %s (passing %u): %s\n", j->scene.operation->name,
	        point ? point : "its end", passing, wrong_words);
	_exit(1);
}

/* A child that operates, or with a repairer repairs, with a point armed. Returns true if it was
 * killed there. */
static bool dies(const job *j, const char *point, uint32_t passing, const enum comer *repairer)
{
	pid_t pid;
	int status;

	fflush(stdout);
	wrong_words[0] = 0;
	pid = fork();
	CHECK(pid >= 0);
	if (!pid) {
		scene s = j->scene;

		if (!repairer && s.operation->ready)
			s.operation->ready(&s);
		if (repairer && *repairer == A_CONSUMER)
			s.ledger->takers = 2; /* what it held may come back after what it saw next */
		shmq_killpoint_arm(point, passing);
		if (repairer)
			repair(&s, *repairer);
		else
			s.operation->act(&s);
		_exit(0);
	}
	EQUAL(waitpid(pid, &status, 0), pid);
	if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
		return true;
	if (status && !wrong_words[0])
		snprintf(wrong_words, WRONG, "the %s ended with status %x",
		         repairer ? "repairer" : "operation", (unsigned)status);
	if (status)
		fail(j, point, passing);
	return false;
}

static void kill_repairers(job *j)
{
	for (uint32_t i = 0; i < REPAIRERS; i++) {
		uint32_t turn = j->tally->turn++;
		enum comer repairer = (enum comer)(turn % COMERS);

		j->tally->repairer_deaths += dies(j, points[repair_points[turn % repair_count]],
		                                  1 + turn / repair_count % 3, &repairer);
	}
}

/* From the beginning to that passing of the point, or (NULL) to the end. `first` comes first and
 * lives; NULL: repairers are killed before. False: it was not passed as often. */
static bool run(job *j, const char *point, uint32_t passing, const enum comer *first)
{
	bool died;

	image_put(&j->start, j->scene.files);
	*j->scene.ledger = j->started;
	died = dies(j, point, passing, NULL);
	j->tally->runs++;
	if (!died && point)
		return false;
	if (died && !first && !j->scene.operation->alone)
		kill_repairers(j);
	if (!verdict(&j->scene, first ? *first : (enum comer)(j->tally->turn % COMERS), &j->others))
		fail(j, point, passing);
	return died;
}

/* ---- all of them ---- */

/* In a process of its own, whose clients live through it all. */
static void kill_everywhere(const operation *o, tally *t)
{
	static job j;
	static files segments;
	uint32_t passed = 0, deaths = 0;

	j.tally = t;
	files_make(&segments);
	scene_make(&j.scene, o, &segments, shared(sizeof(ledger)));
	marks_read(&j.others, (pid_t)syscall(SYS_gettid), &segments, true);
	image_make(&j.start);
	image_follow(&j.start, &segments);
	j.started = *j.scene.ledger;
	run(&j, NULL, 0, NULL);
	for (uint32_t p = 0; p < point_count; p++) {
		uint32_t count = 0;

		while (run(&j, points[p], count + 1, NULL)) {
			count++;
			for (enum comer c = 0; c < COMERS && !o->alone; c++)
				run(&j, points[p], count, &c);
		}
		passed += count != 0;
		deaths += count;
		t->hits[p] += count;
	}
	t->deaths += deaths;
	printf("%-36s %3u points, %4u deaths, 0 violations\n", o->name, passed, deaths);
	fflush(stdout);
	_exit(0);
}

static bool is_sound(const operation *o, tally *t)
{
	pid_t pid;
	int status;

	wrong_words[0] = 0;
	pid = fork();
	CHECK(pid >= 0);
	if (!pid)
		kill_everywhere(o, t);
	EQUAL(waitpid(pid, &status, 0), pid);
	if (status)
		fprintf(stderr, "%s: status %x %s\n", o->name, (unsigned)status, wrong_words);
	return !status;
}

int main(int argc, char **argv)
{
	tally *t = shared(sizeof(*t));
	const char *only = argc > 2 ? argv[2] : NULL;
	uint32_t missed = 0;

	wrong_words = shared(WRONG);
	if (argc < 2 || (only && !operation_named(only))) {
		fprintf(stderr, "usage: test_killpoints SOURCES [OPERATION]\n");
		return 2;
	}
	read_points(argv[1]);
	CHECK(point_count && repair_count);
	for (uint32_t i = 0; i < operation_count(); i++)
		if (!only || !strcmp(only, operation_at(i)->name))
			missed += !is_sound(operation_at(i), t);
	for (uint32_t p = 0; !only && p < point_count; p++)
		if (!t->hits[p]) {
			fprintf(stderr, "no operation passes %s\n", points[p]);
			missed++;
		}
	printf("%u operations, %u points, %u runs, %u deaths of those who acted, %u of those who "
	       "repaired\n",
	       only ? 1 : operation_count(), point_count, t->runs, t->deaths, t->repairer_deaths);
	return missed != 0;
}
