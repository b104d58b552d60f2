#include "tracer.h"

#include "scene.h"

#include <elf.h>
#include <errno.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

static void wait_for(tracee *t)
{
	while (waitpid(t->pid, &t->status, __WALL) < 0)
		CHECK(errno == EINTR);
}

/* Let it run, or step, until something is to be decided. */
static void go(tracee *t, int how)
{
	if (ptrace(how, t->pid, NULL, NULL))
		wrong("ptrace of %d: %s", (int)t->pid, strerror(errno));
	wait_for(t);
}

static bool stopped_by(const tracee *t, int signal)
{
	return WIFSTOPPED(t->status) && WSTOPSIG(t->status) == signal;
}

/* It is outside; on to the next call. */
static void enter(tracee *t)
{
	while (!stopped_by(t, SIGUSR1)) {
		if (stopped_by(t, SIGTERM)) {
			t->complete = true;
			return;
		}
		if (!stopped_by(t, SIGUSR2) && !stopped_by(t, SIGSTOP)) {
			t->failed = true; /* its own words say why, or its status does */
			return;
		}
		go(t, PTRACE_CONT);
	}
	t->entered = true;
}

void tracee_start(tracee *t, void (*act)(void *), void *argument)
{
	*t = (tracee){.pid = fork()};
	CHECK(t->pid >= 0);
	if (!t->pid) {
		if (ptrace(PTRACE_TRACEME, 0, NULL, NULL))
			wrong("this process may not be traced: %s", strerror(errno));
		raise(SIGSTOP);
		act(argument);
		watch_over();
	}
	wait_for(t);
	if (stopped_by(t, SIGSTOP))
		CHECK(!ptrace(PTRACE_SETOPTIONS, t->pid, NULL, PTRACE_O_EXITKILL));
	enter(t);
}

bool tracee_step(tracee *t)
{
	if (t->complete || t->failed)
		return false;
	t->entered = false;
	go(t, PTRACE_SINGLESTEP);
	if (!stopped_by(t, SIGTRAP)) {
		enter(t);
		if (t->complete || t->failed)
			return false;
	}
	t->count++;
	return true;
}

#if defined(__x86_64__)
static bool breakpoint(const tracee *t, uint64_t address, bool on)
{
	size_t base = offsetof(struct user, u_debugreg);

	return !ptrace(PTRACE_POKEUSER, t->pid, base, address) &&
	       !ptrace(PTRACE_POKEUSER, t->pid, base + 7 * sizeof(uint64_t), (uint64_t)on);
}
#else
static bool breakpoint(const tracee *t, uint64_t address, bool on)
{
	(void)t, (void)address, (void)on;
	return false;
}
#endif

bool tracee_run_to(tracee *t, uint64_t address, uint64_t nth)
{
	while (nth && !t->complete && !t->failed) {
		if (t->entered && !breakpoint(t, address, true))
			return false;
		t->entered = false;
		go(t, PTRACE_CONT);
		if (stopped_by(t, SIGTRAP)) {
			nth--;
			continue;
		}
		(void)breakpoint(t, address, false);
		enter(t);
	}
	return true;
}

void tracee_kill(tracee *t)
{
	if (!t->failed || WIFSTOPPED(t->status)) {
		kill(t->pid, SIGKILL);
		do
			wait_for(t);
		while (WIFSTOPPED(t->status));
	}
}

uint64_t tracee_at(const tracee *t)
{
	struct user_regs_struct registers;
	struct iovec to = {&registers, sizeof(registers)};

	if (ptrace(PTRACE_GETREGSET, t->pid, (void *)NT_PRSTATUS, &to))
		return 0;
#if defined(__x86_64__)
	return registers.rip;
#else
	return registers.pc;
#endif
}
