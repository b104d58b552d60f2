/*
 * at_syscall N LOG DIRECTORY COMMAND...: run COMMAND and kill it (SIGKILL, every thread) just
 * before its N-th system call that changes something below DIRECTORY or /dev/shm; N = 0: never. It
 * counts from the start on if N is written with a + before it, else from a SIGUSR2 on, which
 * COMMAND does not get.
 *
 * COMMAND keeps this process: its number, its parent, its streams. The tracer is an orphan that
 * looks on through seccomp; LOG gets a line for each of these calls, and "armed" when the signal
 * has come.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

/* The calls that change a file, and the argument that names it: a descriptor, or a path (with or
 * without a directory's descriptor before it). */
enum by { A_DESCRIPTOR, A_PATH, A_PATH_BEHIND };
static const struct {
	int number;
	const char *name;
	enum by by;
	int argument;
} calls[] = {
#define X(name, by, argument) {SYS_##name, #name, by, argument}
	X(openat, A_PATH_BEHIND, 1),
	X(write, A_DESCRIPTOR, 0),
	X(pwrite64, A_DESCRIPTOR, 0),
	X(writev, A_DESCRIPTOR, 0),
	X(pwritev, A_DESCRIPTOR, 0),
	X(pwritev2, A_DESCRIPTOR, 0),
	X(ftruncate, A_DESCRIPTOR, 0),
	X(fallocate, A_DESCRIPTOR, 0),
	X(fsync, A_DESCRIPTOR, 0),
	X(fdatasync, A_DESCRIPTOR, 0),
	X(fchmod, A_DESCRIPTOR, 0),
	X(fchown, A_DESCRIPTOR, 0),
	X(unlinkat, A_PATH_BEHIND, 1),
	X(mkdirat, A_PATH_BEHIND, 1),
	X(renameat2, A_PATH_BEHIND, 1),
	X(linkat, A_PATH_BEHIND, 1),
	X(truncate, A_PATH, 0),
#ifdef SYS_open
	X(open, A_PATH, 0),
	X(creat, A_PATH, 0),
	X(rename, A_PATH, 0),
	X(renameat, A_PATH_BEHIND, 1),
	X(unlink, A_PATH, 0),
	X(mkdir, A_PATH, 0),
	X(rmdir, A_PATH, 0),
	X(link, A_PATH, 0),
	X(chmod, A_PATH, 0),
#endif
#undef X
};
#define CALLS (sizeof(calls) / sizeof(calls[0]))

static _Noreturn void fail(const char *what)
{
	perror(what);
	_exit(125);
}

/* ---- in COMMAND's process ---- */

/* Most calls of a Python that starts open a file to read it: those do not wait for the tracer. */
static void filter(void)
{
	enum { OPENAT = CALLS + 1, TRACE = OPENAT + 3, ALLOW, LENGTH };
	struct sock_filter program[LENGTH];
	struct sock_fprog all = {.len = LENGTH, .filter = program};

	program[0] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS,
	                                          offsetof(struct seccomp_data, nr));
	for (unsigned i = 0; i < CALLS; i++) {
		unsigned to = calls[i].number == SYS_openat ? OPENAT + 1 : TRACE;

		program[1 + i] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K,
		                                              (unsigned)calls[i].number,
		                                              (unsigned char)(to - i - 2), 0);
	}
	program[OPENAT] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JA, ALLOW - OPENAT - 1, 0, 0);
	program[OPENAT + 1] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS,
	                                                   offsetof(struct seccomp_data, args[2]));
	program[OPENAT + 2] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K,
	                                                   O_CREAT | O_TRUNC, 0, 1);
	program[TRACE] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRACE);
	program[ALLOW] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &all))
		fail("seccomp");
}

/* ---- in the tracer ---- */

static const char *directory;
static FILE *log_file;
static pid_t traced;
static unsigned long wanted, counted;
static int armed;

static unsigned long long argument_of(const struct user_regs_struct *r, int n, int *call)
{
#if defined(__x86_64__)
	const unsigned long long arguments[] = {r->rdi, r->rsi, r->rdx};

	*call = (int)r->orig_rax;
	return arguments[n];
#else
	*call = (int)r->regs[8];
	return r->regs[n];
#endif
}

static int is_below(const char *path)
{
	return !strncmp(path, directory, strlen(directory)) || !strncmp(path, "/dev/shm/", 9);
}

/* The path a call is about, in words; 0: not one of ours. */
static int path_of(pid_t thread, const struct user_regs_struct *r, unsigned at, char *path,
                   size_t size)
{
	int number;
	unsigned long long value = argument_of(r, calls[at].argument, &number);
	char link[64];
	ssize_t n;

	if (calls[at].by == A_DESCRIPTOR) {
		snprintf(link, sizeof(link), "/proc/%d/fd/%lld", (int)thread, (long long)value);
		n = readlink(link, path, size - 1);
	} else {
		struct iovec to = {path, size - 1}, from = {(void *)(size_t)value, size - 1};

		/* up to the end of the page if the string lies near it */
		n = process_vm_readv(thread, &to, 1, &from, 1, 0);
		if (n < 0) {
			from.iov_len = 4096 - value % 4096 < size - 1 ? 4096 - value % 4096 : size - 1;
			n = process_vm_readv(thread, &to, 1, &from, 1, 0);
		}
	}
	if (n < 0)
		return 0;
	path[n] = 0;
	if (number == SYS_openat && !(argument_of(r, 2, &number) & (O_CREAT | O_TRUNC)))
		return 0;
	return is_below(path);
}

static void look(pid_t thread)
{
	struct user_regs_struct r;
	struct iovec to = {&r, sizeof(r)};
	char path[512];
	int number;

	/* its children have the filter too, so they are looked at, but they are others */
	snprintf(path, sizeof(path), "/proc/%d/task/%d", (int)traced, (int)thread);
	if (!armed || access(path, F_OK) ||
	    ptrace(PTRACE_GETREGSET, thread, (void *)1 /* NT_PRSTATUS */, &to))
		return;
	(void)argument_of(&r, 0, &number);
	for (unsigned i = 0; i < CALLS; i++) {
		if (calls[i].number != number || !path_of(thread, &r, i, path, sizeof(path)))
			continue;
		fprintf(log_file, "%lu %s %s\n", ++counted, calls[i].name, path);
		fflush(log_file);
		if (counted == wanted)
			kill(traced, SIGKILL);
	}
}

static void trace(void)
{
	int status;

	for (;;) {
		pid_t thread = waitpid(-1, &status, __WALL);
		int signal = WSTOPSIG(status), event = status >> 16;

		if (thread < 0)
			return;
		if (!WIFSTOPPED(status))
			continue;
		if (event == PTRACE_EVENT_STOP) {
			/* a new thread, or the group is stopped */
			ptrace(signal == SIGTRAP ? PTRACE_CONT : PTRACE_LISTEN, thread, NULL, NULL);
			continue;
		}
		if (event == PTRACE_EVENT_SECCOMP)
			look(thread);
		if (!event && signal == SIGUSR2) {
			fprintf(log_file, "armed\n");
			fflush(log_file);
			armed = 1;
			signal = 0;
		}
		ptrace(PTRACE_CONT, thread, NULL, (void *)(long)(event ? 0 : signal));
	}
}

int main(int argc, char **argv)
{
	int ready[2];
	char c;

	if (argc < 5) {
		fputs("usage: at_syscall [+]N LOG DIRECTORY COMMAND...\n", stderr);
		return 2;
	}
	armed = argv[1][0] == '+';
	wanted = strtoul(argv[1] + armed, NULL, 10);
	directory = argv[3];
	traced = getpid();
	if (pipe(ready))
		fail("pipe");
	prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
	if (!fork()) {
		if (fork())
			_exit(0);
		close(ready[0]);
		setsid();
		log_file = fopen(argv[2], "we");
		if (!log_file ||
		    ptrace(PTRACE_SEIZE, traced, NULL,
		           PTRACE_O_TRACESECCOMP | PTRACE_O_TRACECLONE | PTRACE_O_TRACEFORK |
		                   PTRACE_O_TRACEVFORK | PTRACE_O_TRACEEXEC | PTRACE_O_EXITKILL))
			fail("ptrace");
		if (write(ready[1], "x", 1) != 1)
			fail("pipe");
		/* its streams are COMMAND's, and their reader waits for their end */
		for (int fd = 0; fd < 1024; fd++)
			if (fd != fileno(log_file))
				close(fd);
		trace();
		_exit(0);
	}
	while (wait(NULL) < 0 && errno == EINTR)
		;
	close(ready[1]);
	if (read(ready[0], &c, 1) != 1)
		return 125;
	close(ready[0]);
	filter();
	execvp(argv[4], argv + 4);
	fail(argv[4]);
}
