//! The bytes of an input, unpacked.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

use super::inputs::{Input, Packing};

const BUFFER_BYTES: usize = 1 << 18;

/// Opens an input at a byte of its unpacked contents. Nobody can jump within a compressed file, so there all
/// that stands before is unpacked and dropped.
pub(super) fn open(input: &Input, at: u64) -> io::Result<Box<dyn BufRead + Send>> {
    open_counted(input, at, &Arc::default())
}

/// The same; counts the bytes of the file as they are read.
pub(super) fn open_counted(
    input: &Input,
    at: u64,
    count: &Arc<AtomicU64>,
) -> io::Result<Box<dyn BufRead + Send>> {
    let mut file = File::open(&input.path)?;
    if input.packing == Packing::Plain {
        file.seek(SeekFrom::Start(at))?;
        count.fetch_add(at, Ordering::Relaxed);
    }
    #[cfg(feature = "parquet")]
    if input.packing == Packing::Parquet {
        return skip(Box::new(super::parquet::Lines::open(file, count)?), at);
    }
    let packed = BufReader::with_capacity(BUFFER_BYTES, Counted { file, count: Arc::clone(count) });
    let stream: Box<dyn BufRead + Send> = match input.packing {
        Packing::Plain => return Ok(Box::new(packed)),
        Packing::Parquet => {
            let message = "this build cannot read Parquet; build it with --features parquet";
            return Err(io::Error::new(io::ErrorKind::Unsupported, message));
        }
        Packing::Gzip => Box::new(BufReader::with_capacity(BUFFER_BYTES, MultiGzDecoder::new(packed))),
        Packing::Zstandard => Box::new(BufReader::with_capacity(BUFFER_BYTES, Frames::new(packed))),
    };
    skip(stream, at)
}

fn skip(mut stream: Box<dyn BufRead + Send>, bytes: u64) -> io::Result<Box<dyn BufRead + Send>> {
    let skipped = io::copy(&mut (&mut stream).take(bytes), &mut io::sink())?;
    if skipped < bytes {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(stream)
}

/// The number of the line, counted from 1, in which a byte of the unpacked contents stands.
pub(super) fn line_of(input: &Input, byte: u64) -> Option<u64> {
    let mut before = open(input, 0).ok()?.take(byte);
    let mut lines = 1;
    loop {
        let bytes = before.fill_buf().ok()?;
        if bytes.is_empty() {
            return Some(lines);
        }
        lines += bytes.iter().filter(|&&byte| byte == b'\n').count() as u64;
        let length = bytes.len();
        before.consume(length);
    }
}

/// A file that counts what is read of it.
struct Counted {
    file: File,
    count: Arc<AtomicU64>,
}

impl Read for Counted {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(into)?;
        self.count.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

/// All Zstandard frames of a file in a row, their checksums compared.
struct Frames<Packed> {
    packed: Packed,
    decoder: FrameDecoder,
    inside: bool,
}

impl<Packed: BufRead> Frames<Packed> {
    fn new(packed: Packed) -> Frames<Packed> {
        Frames { packed, decoder: FrameDecoder::new(), inside: false }
    }

    /// Begins the next frame; `false` at the end of the file.
    fn begin(&mut self) -> io::Result<bool> {
        while !self.packed.fill_buf()?.is_empty() {
            match self.decoder.reset(&mut self.packed) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let skipped = io::copy(&mut (&mut self.packed).take(length.into()), &mut io::sink())?;
                    if skipped < length.into() {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(error) => return Err(io::Error::new(io::ErrorKind::InvalidData, error.to_string())),
            }
        }
        Ok(false)
    }

    fn end(&mut self) -> io::Result<()> {
        let stored = self.decoder.get_checksum_from_data();
        if stored.is_some() && stored != self.decoder.get_calculated_checksum() {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a checksum does not match"));
        }
        self.inside = false;
        Ok(())
    }
}

impl<Packed: BufRead> Read for Frames<Packed> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            if !self.inside {
                if !self.begin()? {
                    return Ok(0);
                }
                self.inside = true;
            }
            if self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                self.decoder
                    .decode_blocks(&mut self.packed, BlockDecodingStrategy::UptoBlocks(1))
                    .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))?;
            }
            let read = self.decoder.read(into)?;
            if read > 0 || into.is_empty() {
                return Ok(read);
            }
            if self.decoder.is_finished() && self.decoder.can_collect() == 0 {
                self.end()?;
            }
        }
    }
}
