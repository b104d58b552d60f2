/*
 * The check can fail: a core with a seeded fault (../mutants) is killed at every instruction of one
 * operation, and the first violation must say WORDS. Without WORDS nothing may be found.
 *
 * Usage: kill_mutant OPERATION [WORDS]
 */
#include "death.h"
#include "operations.h"

#include <errno.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* In a process of its own, as in kill.c. */
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

int main(int argc, char **argv)
{
	const operation *o = argc > 1 ? operation_named(argv[1]) : NULL;
	const char *words = argc > 2 ? argv[2] : NULL;
	count *c = shared(sizeof(count));
	bool right;

	if (!o) {
		fprintf(stderr, "usage: kill_mutant OPERATION [WORDS]; kill --list names the operations\n");
		return 2;
	}
	run(o, c);
	right = words ? c->violations && strstr(c->told[0], words) : c->over && !c->violations;
	if (!right)
		printf("wanted '%s', got: %s\n", words ? words : "nothing",
		       c->violations ? c->told[0] : "nothing");
	return !right;
}
