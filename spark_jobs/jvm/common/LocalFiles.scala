package org.apache.spark.sql.statefleet

import java.nio.file.Files
import java.nio.file.attribute.PosixFilePermissions
import org.apache.hadoop.fs.{LocalFileSystem, Path, RawLocalFileSystem}
import org.apache.hadoop.fs.permission.FsPermission

/**
 * Hadoop's files of this machine, without a process for each file: Hadoop runs `chmod` where it does not find its
 * native library, which PySpark does not have, and a batch writes several files of a checkpoint.
 */
class LocalFiles extends LocalFileSystem(new LocalFiles.Raw)

object LocalFiles {
  private class Raw extends RawLocalFileSystem {
    override def setPermission(file: Path, permission: FsPermission): Unit =
      // Java knows no sticky bit.
      if (permission.getStickyBit) super.setPermission(file, permission)
      else Files.setPosixFilePermissions(pathToFile(file).toPath, PosixFilePermissions.fromString(permission.toString))
  }
}
