#include "base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
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

/* The file behind a mapping, as a line of /proc/PID/maps names it. */
typedef struct mapped_file {
	unsigned major, minor;
	unsigned long inode; /* 0: none */
} mapped_file;

/* Read a line of the form `from-to permissions offset major:minor inode path`. Returns false at the
 * end. */
static bool mapping_next(FILE *maps, uintptr_t *from, uintptr_t *to, mapped_file *file)
{
	int read = fscanf(maps, "%" SCNxPTR "-%" SCNxPTR " %*4s %*x %x:%x %lu%*[^\n]", from, to,
	                  &file->major, &file->minor, &file->inode);

	return read == 5;
}

bool process_may_map(pid_t thread, const void *address)
{
	uintptr_t at = (uintptr_t)address, from, to;
	mapped_file ours = {0, 0, 0}, its;
	FILE *maps = fopen("/proc/self/maps", "re");
	char path[40];
	bool told = false, maps_it = false;

	if (!maps)
		return true;
	while (mapping_next(maps, &from, &to, &its))
		if (at >= from && at < to)
			ours = its;
	fclose(maps);
	snprintf(path, sizeof(path), "/proc/%d/maps", (int)thread);
	maps = ours.inode ? fopen(path, "re") : NULL;
	if (!maps)
		return true;
	while (!maps_it && mapping_next(maps, &from, &to, &its)) {
		told = true;
		maps_it = its.inode == ours.inode && its.major == ours.major && its.minor == ours.minor;
	}
	fclose(maps);
	return maps_it || !told;
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

bool random_bits(uint64_t out[2])
{
	ssize_t got;

	do
		got = getrandom(out, 16, 0);
	while (got < 0 && errno == EINTR);
	return got == 16;
}

void random_identity(uint64_t out[2])
{
	if (!random_bits(out)) {
		out[0] = (uint64_t)getpid();
		out[1] = 1;
	}
}
