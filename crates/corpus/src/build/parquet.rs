//! Parquet files, unpacked to JSON lines: a line for each row, with the columns that hold text. So whatever works with those
//! works with these, and `--field` names a column.

use std::fs::File;
use std::io::{self, BufRead, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parquet::basic::{ConvertedType, LogicalType, Repetition};
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use parquet::record::reader::RowIter;
use parquet::schema::types::Type;

/// The rows of a file as lines.
pub(super) struct Lines {
    rows: RowIter<'static>,
    /// The line that is being read, and how much of it has been.
    line: Vec<u8>,
    read: usize,
    /// Bytes of the file that a row stands for, so that progress can be shown.
    row_bytes: u64,
    count: Arc<AtomicU64>,
}

impl Lines {
    pub(super) fn open(file: File, count: &Arc<AtomicU64>) -> io::Result<Lines> {
        let bytes = file.metadata()?.len();
        let reader = SerializedFileReader::new(file).map_err(broken)?;
        let metadata = reader.metadata().file_metadata();
        let rows = u64::try_from(metadata.num_rows()).unwrap_or(0);
        let root = metadata.schema();
        let texts = root.get_fields().iter().filter(|column| is_text(column)).cloned().collect();
        let schema = Type::group_type_builder(root.name()).with_fields(texts).build().map_err(broken)?;
        let rows_of_texts =
            RowIter::from_file_into(Box::new(reader)).project(Some(schema)).map_err(broken)?;
        let row_bytes = bytes / rows.max(1);
        Ok(Lines { rows: rows_of_texts, line: Vec::new(), read: 0, row_bytes, count: Arc::clone(count) })
    }
}

fn is_text(column: &Type) -> bool {
    let about = column.get_basic_info();
    let is_string = about.converted_type() == ConvertedType::UTF8
        || about.logical_type_ref().is_some_and(|kind| matches!(kind, LogicalType::String));
    column.is_primitive() && is_string && about.repetition() != Repetition::REPEATED
}

fn broken(error: ParquetError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error.to_string())
}

impl BufRead for Lines {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.read == self.line.len() {
            (self.read, self.line) = (0, std::mem::take(&mut self.line));
            self.line.clear();
            if let Some(row) = self.rows.next() {
                let row = row.map_err(broken)?;
                let texts = row.get_column_iter().filter_map(|(name, field)| match field {
                    Field::Str(text) => Some((name.clone(), serde_json::Value::from(text.as_str()))),
                    _ => None,
                });
                let record: serde_json::Map<_, _> = texts.collect();
                serde_json::to_writer(&mut self.line, &record)?;
                self.line.push(b'\n');
                self.count.fetch_add(self.row_bytes, Ordering::Relaxed);
            }
        }
        Ok(&self.line[self.read..])
    }

    fn consume(&mut self, bytes: usize) {
        self.read += bytes;
    }
}

impl Read for Lines {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let here = self.fill_buf()?;
        let bytes = here.len().min(into.len());
        into[..bytes].copy_from_slice(&here[..bytes]);
        self.consume(bytes);
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use parquet::data_type::{ByteArray, ByteArrayType, Int32Type};
    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;

    use super::*;

    /// Two groups of rows with a number, a text that may be missing, and raw bytes.
    fn write(path: &Path) {
        let message = "message rows { required int32 id; optional binary text (UTF8); required binary raw; }";
        let schema = Arc::new(parse_message_type(message).unwrap());
        let properties = Arc::new(WriterProperties::builder().build());
        let mut writer = SerializedFileWriter::new(File::create(path).unwrap(), schema, properties).unwrap();
        for group in 0..2 {
            let mut rows = writer.next_row_group().unwrap();
            let mut ids = rows.next_column().unwrap().unwrap();
            ids.typed::<Int32Type>().write_batch(&[group, group + 1], None, None).unwrap();
            ids.close().unwrap();
            let mut texts = rows.next_column().unwrap().unwrap();
            let text = ByteArray::from(format!("grüße\n\"{group}\"").into_bytes());
            texts.typed::<ByteArrayType>().write_batch(&[text], Some(&[1, 0]), None).unwrap();
            texts.close().unwrap();
            let mut raws = rows.next_column().unwrap().unwrap();
            let raw = ByteArray::from(vec![0xFF]);
            raws.typed::<ByteArrayType>().write_batch(&[raw.clone(), raw], None, None).unwrap();
            raws.close().unwrap();
            rows.close().unwrap();
        }
        writer.close().unwrap();
    }

    #[test]
    fn rows_are_lines_of_their_texts() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.parquet");
        write(&path);
        let count = Arc::default();
        let lines = Lines::open(File::open(&path).unwrap(), &count).unwrap();
        let lines: Vec<String> = lines.lines().map(Result::unwrap).collect();
        let text = |group: usize| format!(r#"{{"text":"grüße\n\"{group}\""}}"#);
        assert_eq!(lines, [text(0), "{}".into(), text(1), "{}".into()]);
        assert!(count.load(Ordering::Relaxed) > 0);
    }

    #[test]
    fn a_damaged_file_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.parquet");
        write(&path);
        let whole = std::fs::read(&path).unwrap();
        for cut in [0, 3, whole.len() / 2, whole.len() - 1] {
            std::fs::write(&path, &whole[..cut]).unwrap();
            assert!(Lines::open(File::open(&path).unwrap(), &Arc::default()).is_err(), "{cut} bytes");
        }
    }
}
