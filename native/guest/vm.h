/* What the parts of a machine's guest, vm.c, port.c and vm_limits.c, say to each other. */
#ifndef DSEC_VM_H
#define DSEC_VM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define GROUPS_DIR "/sys/fs/cgroup/dsec" /* of all commands */

_Noreturn void vm_give_up(const char *what, int error);
void vm_say_to(const char *path, const char *text);
size_t vm_read_text(const char *path, char *text, size_t capacity); /* without a line feed at its end; 0 where there is none */
bool vm_command_line(const char *name, char *value, size_t capacity);
bool vm_find_device(const char *class, const char *attribute, const char *value, char *path, size_t capacity);

void vm_limit(uint64_t pids, bool no_new_privs); /* of what runs in the machine from now on */
void vm_limit_programs(uint64_t pids, bool no_new_privs); /* the same, where all others are set */
bool vm_find_disk(const char *serial, char *path, size_t capacity);

void port_open(void);  /* or begin to listen for it */
bool port_stays(void); /* it is one for good */
void port_again(void); /* in a program that was started anew: it is DSEC_FD_CHANNEL */
void port_begin(void); /* there is somebody at its other end, or will be */
void port_wait(void);  /* until something may have changed */
void port_take(uint8_t *data, size_t size);
void port_put(uint8_t type, uint64_t op, const uint8_t *payload, size_t size);
int port_end(int least); /* its descriptor, from this number on: the channel's from now on */

#endif
