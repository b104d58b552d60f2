#include "process.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

static ssize_t read_file(const char *path, char *buffer, size_t size)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n;

	if (fd < 0)
		return -1;
	n = read(fd, buffer, size - 1);
	close(fd);
	if (n >= 0)
		buffer[n] = 0;
	return n;
}

process_identity process_identify(pid_t pid)
{
	process_identity who = {0, 0};
	char path[40], text[1024], *field;
	int number;

	snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
	if (read_file(path, text, sizeof(text)) <= 0)
		return who;
	/* The program's name may contain any character, also blanks and parentheses. */
	field = strrchr(text, ')');
	if (!field)
		return who;
	for (number = 2; field && number < 28; field = strchr(field + 1, ' ')) {
		number++;
		if (number - 1 == 22)
			who.start_time = strtoull(field + 1, NULL, 10);
	}
	if (field)
		who.program = strtoull(field + 1, NULL, 10);
	return who;
}

uint64_t pid_namespace_inode(void)
{
	struct stat s;

	return stat("/proc/self/ns/pid", &s) ? 0 : (uint64_t)s.st_ino;
}

void boot_identity(uint64_t out[2])
{
	char text[64], digits[33];
	int n = 0;

	out[0] = out[1] = 0;
	if (read_file("/proc/sys/kernel/random/boot_id", text, sizeof(text)) <= 0)
		return;
	for (char *c = text; *c && n < 32; c++)
		if (*c != '-' && *c != '\n')
			digits[n++] = *c;
	digits[n] = 0;
	if (n == 32)
		out[1] = strtoull(digits + 16, NULL, 16);
	digits[16] = 0;
	out[0] = strtoull(digits, NULL, 16);
}

void random_identity(uint64_t out[2])
{
	if (getrandom(out, 16, 0) != 16) {
		out[0] = (uint64_t)getpid();
		out[1] = 1;
	}
}
