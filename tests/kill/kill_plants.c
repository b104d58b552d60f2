/*
 * The run can fail: a core in which one store is left out or two are swapped (SHMQ_PLANTED(n) in
 * native/core) is killed at every instruction of one operation, and that has to be found.
 */
#include "death.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

unsigned shmq_planted;

static const struct {
	const char *fault, *operation, *words;
} plants[] = {
	{"nothing", "publish a batch to three channels", NULL},
	{"PREPARED is stored before the fields", "publish to three channels", "comes behind 0"},
	{"the commit word is stored after the flips", "publish to three channels", "beyond the commit word"},
	{"the due time is left out", "publish deferred", "before its time"},
	{"SPILLING does not forget an old position", "spill again", "is lost"},
	{"the read position is stored after the messages are BACK", "restore", "is there twice"},
	{"empty leaves the read position where it was", "empty with a file", "back after its finish"},
	{"who finds the deliver lock's holder dead does not set dirty", "take many", "queue 0: "},
	{"the publish lock is not made consistent", "publish to a channel", "the publish lock"},
	{"rebuild does not sort the ready ring", "rebuild what has wrapped", "comes behind"},
	{"the reaper rings nobody", "publish to a waiter", "a waiter sleeps on"},
};

static const operation *find(const char *name)
{
	for (uint32_t i = 0; i < operation_count; i++)
		if (!strcmp(operations[i].name, name))
			return &operations[i];
	fprintf(stderr, "there is no operation '%s'\n", name);
	exit(2);
}

/* In a process of its own, as for kill.c. */
static void run(const operation *o, count *c)
{
	static const plan once = {.every = 1, .real = 50, .first = true};
	pid_t pid = fork();
	int status;

	if (!pid) {
		death_of(o, &once, c);
		_exit(0);
	}
	while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
		;
}

int main(void)
{
	int missed = 0;

	for (uint32_t i = 0; i < sizeof(plants) / sizeof(plants[0]); i++) {
		count *c = shared(sizeof(count));
		bool right;

		shmq_planted = i;
		run(find(plants[i].operation), c);
		right = plants[i].words ? c->violations && strstr(c->told[0], plants[i].words) : !c->violations;
		printf("%-60s %s\n", plants[i].fault, !right ? "MISSED" : plants[i].words ? "found" : "right");
		if (!right)
			printf("    wanted '%s', got: %s\n", plants[i].words ? plants[i].words : "",
			       c->violations ? c->told[0] : "nothing");
		fflush(stdout);
		missed += !right;
	}
	return missed != 0;
}
