/* The rules for names of topics and channels: nsqd's. */
#include "base/names.h"

#include "shmq.h"

#include <string.h>

bool shmq_name_ephemeral(const char *name, size_t length)
{
	static const char suffix[] = "#ephemeral";
	size_t n = sizeof(suffix) - 1;

	return length > n && !memcmp(name + length - n, suffix, n);
}

bool shmq_name_valid(const char *name, size_t length)
{
	size_t plain = length;

	if (!length || length > 64)
		return false;
	if (shmq_name_ephemeral(name, length))
		plain -= 10;
	for (size_t i = 0; i < plain; i++) {
		char c = name[i];

		if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
		      c == '.' || c == '_' || c == '-'))
			return false;
	}
	return true;
}

bool name_ok(const char *name)
{
	return shmq_name_valid(name, strlen(name));
}
